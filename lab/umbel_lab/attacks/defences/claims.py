"""The claim of a target, and three kinds of figures beside it that are never mixed.

*Proved* figures count right guesses (`trials`), *fitted* ones assume a law of noise that passed a test (`laws`), and
*formula* figures come from umbel's accountant, for any two updates that a target would clip as it says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from umbel.privacy.accounting.accountant import compose
from umbel.privacy.accounting.guarantee import DELTA
from umbel.protocol.errors import ConfigError
from umbel_lab.attacks.audit.findings import Bound
from umbel_lab.attacks.defences.laws import GAUSSIAN, LAPLACE, VECTOR, loss


@dataclass(frozen=True)
class Claim:
    """A claim about one release, or about all that one target makes.

    Attributes
    ----------
    epsilon : float, optional
        None if nothing is claimed.
    delta : float
        0 for a pure epsilon; `DELTA` if nothing is claimed.
    clip_norm : float, optional
        Euclidean norm to which updates are clipped.
    box : float, optional
        Instead: the bound of each value.
    sums : bool
        Whether the norm is the sum of magnitudes, not Euclidean.
    """

    epsilon: float | None
    delta: float
    clip_norm: float | None
    box: float | None
    sums: bool = False

    @property
    def unit(self) -> float:
        """The length of a clipped update along one value; 1 if the target tells no limit."""
        return self.clip_norm or self.box or 1.0

    def reach(self, n: int) -> float:
        """Return the length of the longest update whose n values are alike."""
        return self.unit * (math.sqrt(n) if self.clip_norm is None and self.box is not None else 1.0)


def claim_of(
    facts: Mapping[str, Any],
    epsilon: float | None = None,
    delta: float | None = None,
    clip_norm: float | None = None,
) -> Claim:
    """Return the claim in a target's attributes, with what the user gives in its place.

    Raises
    ------
    ConfigError
        If a figure is out of range.
    """
    for name, value, most in (
        ("epsilon", epsilon, math.inf),
        ("delta", delta, 1.0),
        ("clip norm", clip_norm, math.inf),
    ):
        if value is not None and not 0 <= value < most:
            raise ConfigError(f"the {name} of a claim cannot be {value:g}", code="config.audit-claim")
    found = facts["epsilon"] if epsilon is None else epsilon
    told = facts["delta"] if delta is None else delta
    norm = facts["clip_norm"] if clip_norm is None else clip_norm
    if told is None or not 0 <= told < 1:
        told = DELTA if found is None else 0.0
    return Claim(found, told, norm or None, None if norm else facts["box"], bool(norm) and facts["order"] == 1)


@dataclass(frozen=True)
class Figures:
    """The figures for a number of rounds, each at the delta of the claim.

    Attributes
    ----------
    rounds : int
        Releases of each canary.
    claimed : float, optional
        By the target, or by its account after so many rounds.
    formula : float, optional
        For any two updates; None if the target's noise is of no known law, or it tells no clip norm.
    fitted, low, high : float, optional
        Of the canaries' two updates, with an interval; None if the noise is of no known law.
    proved : Bound
        Of the same two updates.
    provable : float
        The most that so many canaries can prove.
    """

    rounds: int
    claimed: float | None
    formula: float | None
    fitted: float | None
    low: float | None
    high: float | None
    proved: Bound
    provable: float


def formula(claim: Claim, law: str, scale: float, distance: float, n: int, rounds: int) -> float:
    """Return the epsilon of so many rounds between any two updates, by umbel's accountant.

    Parameters
    ----------
    claim : Claim
        For delta, and whether each value or the norm is bounded.
    law : str
        The law of the noise in each value, or of the noise as a vector.
    scale : float
        Its scale.
    distance : float
        Between releases: of two clip norms, or of two values at the ends of a box.
    n : int
        Values of an update.
    rounds : int
        Number of releases.
    """
    apart, boxed = distance / scale, claim.clip_norm is None
    if law == VECTOR:
        return compose({loss(VECTOR, apart, n): rounds}, claim.delta)
    if law == GAUSSIAN:
        return compose({loss(GAUSSIAN, apart * (math.sqrt(n) if boxed else 1.0)): rounds}, claim.delta)
    # The sum of the values' distances counts, at most the root of n times the Euclidean one.
    if boxed:
        return compose({loss(LAPLACE, apart): n * rounds}, claim.delta)
    return apart * (1.0 if claim.sums else math.sqrt(n)) * rounds
