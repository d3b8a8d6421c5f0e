"""The terms of a run's secure sums: what all parties have to agree on, and what follows from it."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise

from umbel.protocol.errors import Refused

FINEST = 8
"""The deviation of each layer of noise, in steps, is at least this: then sums of layers are as good as normal."""
STEPS = 256
"""Minimum of the steps in the deviation of a whole sum's noise."""
LARGEST = 1 << 15
"""Maximum deviation of a whole sum's noise, in steps: the table from which it is drawn takes memory and time."""
WITHOUT_NOISE = 1 << 16
"""Steps in a clip norm, where there is no noise."""
_FAR = 14.0
"""Deviations that noise exceeds with a probability below 1e-40."""


@dataclass(frozen=True)
class Terms:
    """The terms that the parties of a run agree on. A party's keys and signatures hold for the same terms only.

    Attributes
    ----------
    run : str
        Names the run; keys are made for it.
    length : int
        Number of integers in a sum.
    bits : int
        Integers are added modulo ``2**bits``.
    deviation : float
        Standard deviation of a sum's noise, in steps, that the honest survivors guarantee.
    colluding : int
        a, the number of parties that may give all their secrets to the server.
    least : int
        Minimum number of parties in a sum.

    Raises
    ------
    Refused
        If no sum can hide anything on these terms.
    """

    run: str
    length: int
    bits: int
    deviation: float
    colluding: int = 0
    least: int = 3

    def __post_init__(self) -> None:
        if not (self.length > 0 and 1 <= self.bits <= 62 and 0 <= self.deviation <= LARGEST):
            raise Refused(f"no sum has the terms {self}", code="refused.secure-terms")
        if not 0 <= self.colluding <= self.least - 2:
            raise Refused(
                f"with {self.colluding} colluding parties, a sum needs at least {self.colluding + 2} parties, not "
                f"{self.least}",
                code="refused.secure-terms",
            )

    @cached_property
    def digest(self) -> str:
        """A SHA-256 of all terms."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def threshold(self, parties: int) -> int:
        """Return t, how many of n parties have to sign a set of survivors: more than (n + a) / 2.

        Two sets have at least 2 t signatures. Honest parties sign once, and the others up to twice, which gives at most
        n + a. So no server can show two sets.
        """
        return (parties + self.colluding) // 2 + 1

    def check_parties(self, parties: int) -> None:
        """Raise `Refused` if a sum of so many parties hides too little."""
        if parties < self.least or self.threshold(parties) > parties:
            text = f"a sum of {parties} parties, {self.colluding} of them colluding, is too small; the least is"
            raise Refused(f"{text} {max(self.least, self.colluding + 2)}", code="refused.secure-parties")
        if 0 < self.deviation < finest_deviation(parties, self.colluding):
            raise Refused(
                f"noise of {self.deviation:g} steps is too coarse to share among {parties} parties; make the grid "
                "finer",
                code="refused.secure-terms",
            )

    def layers(self, parties: int) -> list[float]:
        r"""Return the deviations of the layers of noise that a party adds, in steps; empty without noise.

        With u survivors, each of them keeps the first n - u + 1 layers, whose variances sum to \sigma^2 / (u - a). So
        the u - a honest ones together have \sigma^2, whoever survives. The other layers are taken back.
        """
        if not self.deviation:
            return []
        honest = [parties - gone - self.colluding for gone in range(parties - self.threshold(parties) + 1)]
        variances = [1 / honest[0], *(1 / fewer - 1 / more for more, fewer in pairwise(honest))]
        return [self.deviation * math.sqrt(variance) for variance in variances]


@dataclass(frozen=True)
class Grid:
    """The whole numbers of a sum.

    Attributes
    ----------
    step : float
        The size of a step, in the model's numbers.
    weight : float
        Steps in a clip norm; in a grid of reports, in their bound.
    """

    step: float
    weight: float

    @classmethod
    def of(cls, clip_norm: float, noise_multiplier: float, deviation: float) -> Grid:
        r"""Return the grid on which noise of \nu clip norms has a deviation of so many steps.

        Without noise a clip norm has `WITHOUT_NOISE` steps.
        """
        weight = deviation / noise_multiplier if noise_multiplier > 0 else float(WITHOUT_NOISE)
        if not weight >= 1:
            text = f"noise of {noise_multiplier:g} clip norms leaves no step in a clip norm; make the grid finer"
            raise Refused(text, code="refused.secure-terms")
        if not (step := clip_norm / weight) >= sys.float_info.min:
            text = f"a clip norm of {clip_norm:g} has no {weight:g} steps that can be computed"
            raise Refused(text, code="refused.secure-terms")
        return cls(step, weight)

    @classmethod
    def of_reports(cls, bound: float, noise_multiplier: float, deviation: float) -> Grid:
        r"""Return the grid of loss and metric, each from 0 to a bound of `weight` steps.

        The noise has a deviation of \nu diagonals of the square in which a report lies.
        """
        return cls.of(bound, math.sqrt(2) * noise_multiplier, deviation)


def finest_deviation(parties: int, colluding: int = 0) -> float:
    """Return the smallest deviation of a sum's noise, in steps, that n parties can share."""
    # The thinnest layer has 1 / ((n - a) (n - a - 1)) of the variance.
    return max(float(STEPS), FINEST * float(parties - colluding))


def bits_for(largest: float, deviation: float, parties: int, colluding: int = 0) -> int:
    """Return how many bits a sum needs whose parts add up to at most `largest` steps in size, with noise.

    The sum then wraps around with a probability below 1e-40 a number. That costs accuracy alone: what the server sees
    is computed from the sum with noise.
    """
    # At most n survivors, each with at most 1 / (t - a) of the variance, and t - a > (n - a) / 2.
    noise = _FAR * deviation * math.sqrt(2 * parties / (parties - colluding))
    return math.ceil(math.log2(2 * (largest + noise) + 1))
