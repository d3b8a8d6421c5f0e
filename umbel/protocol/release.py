"""What a client gave away at once: one word for gate, ledger, accountant, planner and report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

LAPLACE = "laplace"
"""The mechanism of the group privacy paper, and the default."""

MAX_CHOICE_EPSILON = 30.0
"""Beyond it a choice is as good as open, and its chances are finer than random numbers are."""

NOISE_STEPS = 16
"""The standard deviation of a component's noise spans at least so many steps of the grid on which a release is rounded,
and so many steps of 32-bit numbers."""

_LONGEST, _GRAIN = 1000, 2**32  # denominators of prices


class Clipping(StrEnum):
    """How large an update the noise hides."""

    UPDATE = "update"
    """The norm of the client's own update, at least a floor (the group privacy paper): a heuristic."""
    PUBLIC = "public"
    """A clip norm that everybody knows, to which the client clips its update: a guarantee."""


class Kind(StrEnum):
    """What is released."""

    TRAIN = "train"
    """A trained model."""
    SITE = "site"
    """What a site makes of its clients' updates together, and of which hypotheses they chose."""
    REPORT = "report"
    """Loss and metric of a client that also trains."""


class ReleaseBy(StrEnum):
    """Who adds the noise to what."""

    CLIENT = "client"
    """Each client to its own model. Others see the model only with noise."""
    SITE = "site"
    """A site once to the sums of its clients' updates: the clients trust it."""


class NoisePer(StrEnum):
    """What is noised by itself, within a radius of its own."""

    VECTOR = "vector"
    """All parameters as one."""
    LAYER = "layer"
    """The parameters of each layer (group privacy paper, Sec. 5.3)."""
    ROW = "row"
    """Each row of each array, as an item of a recommender."""


@dataclass(frozen=True)
class ClipSchedule:
    """The clip norm of round t.

    Mode ``update``: `floor`. Mode ``public``: ``start * decay**(t - 1)``, at least `floor`.
    """

    mode: Clipping = Clipping.PUBLIC
    floor: float = 0.01
    start: float = 2.0
    decay: float = 0.85

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", Clipping(self.mode))

    def at(self, round: int) -> float:
        """Return the clip norm of a round, counted from 1."""
        public = self.mode is Clipping.PUBLIC
        return max(self.start * self.decay ** (round - 1), self.floor) if public else self.floor


@dataclass(frozen=True)
class Release:
    """One release of one client, as far as what it costs goes.

    A site's release is one of each client that took part in it.

    Attributes
    ----------
    n : int
        Numbers released: the model's shared parameters, or 2 for a report.
    noise_multiplier : float
        nu; 0 for a release without noise.
    radius : float or None
        The public clip norm. None in mode ``update``, since the norm of an update must not be written down. None as
        well where releases of different clip norms are counted together, which cost the same.
    mechanism : str
        The law of the noise, by name.
    hypotheses : int
        k, among which the client chose; 0 where that is not on record.
    choice_epsilon : float
        Of what hides the choice: randomised response, or in a site's release the noise on how many clients
        chose each hypothesis. 0 where nothing hides it, as in the paper, or that noise costs nothing extra.
    """

    kind: Kind
    n: int
    noise_multiplier: float
    clipping: Clipping
    radius: float | None = None
    mechanism: str = LAPLACE
    hypotheses: int = 1
    choice_epsilon: float = 0.0

    @property
    def paper_cost(self) -> Fraction | None:
        """The paper's budget, a heuristic: n / nu within the radius (group privacy paper, Sec. 4.1.3).

        None, for no bound at all, without noise or with another than the paper's.
        """
        counted = self.noise_multiplier > 0 and self.mechanism == LAPLACE
        return quotient(self.n, self.noise_multiplier) if counted else None

    @property
    def chooses(self) -> bool:
        """Whether the client chose among hypotheses, and what it releases may tell which."""
        return self.hypotheses != 1

    @property
    def formal(self) -> bool:
        """Whether it has a guarantee between any two data sets of the client: clip norm and choice are covered.

        A site's release covers the choice by itself.
        """
        covered = self.choice_epsilon > 0 or not self.chooses or self.kind is Kind.SITE
        return self.clipping is Clipping.PUBLIC and self.noise_multiplier > 0 and covered

    def paper_spend(self, times: float) -> float:
        """Return the paper's budget of so many releases; infinite where it counts none."""
        if self.paper_cost is None:
            return float("inf") if times else 0.0
        return float(Fraction(times) * self.paper_cost)


def exact(value: float) -> Fraction:
    """Return the number that people wrote: .3 is 3/10, and not the binary number next to it."""
    return Fraction(repr(float(value)))


@lru_cache(maxsize=64)
def quotient(above: int, below: float) -> Fraction:
    """Return above / below, exactly where the fraction is short, and else rounded up to a multiple of 2**-32.

    Sums of many prices stay cheap to compute that way, and are never too small.
    """
    price = Fraction(above) / exact(below)
    if price.denominator <= _LONGEST:
        return price
    return Fraction(math.ceil(price * _GRAIN), _GRAIN)
