"""The claim of a target, the canaries that test it, and figures of three kinds that are never mixed.

*Proved* figures count right guesses, *fitted* ones assume a law of noise that passed a test (`laws`), and *formula*
figures come from umbel's accountant, for any two updates that a target would clip as it says.

Each canary has a coin, which selects one of two opposite updates, far longer than the clip norm. The auditor sees the
releases and guesses the coin from their position along the line between the two. The first canaries fix the position
and the number of guesses; the bound counts only the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.privacy.accounting.accountant import compose
from umbel.privacy.accounting.guarantee import DELTA
from umbel.protocol.errors import ConfigError
from umbel_lab.attacks.audit.bounds import PILOTS, Bound, lower_bound, prove, surest
from umbel_lab.attacks.defences.laws import GAUSSIAN, LAPLACE, VECTOR, loss
from umbel_lab.attacks.defences.process import Seen, Worker

Matrix = NDArray[np.float64]
Coins = NDArray[np.int64]

BEYOND = 1000.0
"""Length of an update, in clip norms, if the target clips it."""

_SIZES = 40  # numbers of guesses that the pilots try
_COINS = 212  # purpose of draws


@dataclass(frozen=True)
class Claim:
    """A claim about one release, or about all that one target makes.

    Without an `epsilon` nothing is claimed. A `delta` of 0 is for a pure epsilon. Updates are clipped to the Euclidean
    `clip_norm`, or, with `sums`, to that sum of magnitudes; or each value to the bound `box`.
    """

    epsilon: float | None
    delta: float
    clip_norm: float | None
    box: float | None
    sums: bool = False

    @property
    def bounded(self) -> bool:
        """Whether the target tells a limit of updates."""
        return self.clip_norm is not None or self.box is not None

    @property
    def unit(self) -> float:
        """The length of a clipped update along one value; 1 if the target tells no limit."""
        return self.clip_norm or self.box or 1.0

    def reach(self, n: int) -> float:
        """Return the length of the longest update whose n values are alike."""
        return self.unit * (math.sqrt(n) if self.clip_norm is None and self.box is not None else 1.0)


def claim_of(
    facts: Mapping[str, Any], epsilon: float | None = None, delta: float | None = None, clip_norm: float | None = None
) -> Claim:
    """Return the claim in a target's attributes, with what the user gives in its place.

    Raises
    ------
    ConfigError
        If a figure is out of range.
    """
    limits = {"epsilon": (epsilon, math.inf), "delta": (delta, 1.0), "clip norm": (clip_norm, math.inf)}
    for name, (value, most) in limits.items():
        if value is not None and not 0 <= value < most:
            raise ConfigError(f"the {name} of a claim cannot be {value:g}", code="config.audit-claim")
    claimed = facts["epsilon"] if epsilon is None else epsilon
    allowed = facts["delta"] if delta is None else delta
    norm = facts["clip_norm"] if clip_norm is None else clip_norm
    if allowed is None or not 0 <= allowed < 1:
        allowed = DELTA if claimed is None else 0.0
    return Claim(claimed, allowed, norm or None, None if norm else facts["box"], bool(norm) and facts["order"] == 1)


def formula(claim: Claim, law: str, scale: float, distance: float, n: int, rounds: int) -> float:
    """Return the epsilon of so many rounds between any two updates of n values, by umbel's accountant.

    The law is that of the noise in each value, or of the noise as a vector. The distance of releases is that of two
    clip norms, or of two values at the ends of a box.
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


@dataclass(frozen=True)
class Line:
    """The releases of canaries with coins of 1 or -1, whose two updates are opposite along the unit vector (n,)."""

    direction: Matrix
    coins: Coins
    seen: Seen

    @property
    def positions(self) -> Matrix:
        """The position (canaries, rounds) of each release along the line; 0 where nothing left."""
        positions: Matrix = np.nan_to_num(self.seen.left, posinf=1e300, neginf=-1e300) @ self.direction
        return positions

    @property
    def first(self) -> tuple[Matrix, Matrix]:
        """The positions of the first releases with coin 1, and with coin -1."""
        there, first = ~self.seen.gone[:, 0], self.positions[:, 0]
        return first[there & (self.coins > 0)], first[there & (self.coins < 0)]

    def length(self, share: float) -> tuple[float, float]:
        """Return the length with which updates leave, per unit of `share`, and its standard error."""
        up, down = self.first
        if not (len(up) and len(down)):
            return 0.0, 0.0
        error = math.hypot(up.std() / math.sqrt(len(up)), down.std() / math.sqrt(len(down))) / 2
        return float(up.mean() - down.mean()) / 2 / share, error / share


def directions(n: int) -> tuple[Matrix, Matrix]:
    """Return the unit vectors (n,) of the two lines: along one value, and along all values."""
    return np.eye(n)[0], np.full(n, n**-0.5)


def draw(worker: Worker, direction: Matrix, length: float, canaries: int, rounds: int, seed: int) -> Line:
    """Send canaries with updates of a length through the target."""
    coins = 2 * np.random.default_rng([seed, _COINS]).integers(2, size=canaries) - 1
    seen = worker.run(np.stack([length * direction, -length * direction]), np.where(coins > 0, 0, 1), rounds)
    return Line(direction, coins, seen)


def judged(canaries: int) -> int:
    """Return how many of the canaries are not pilots."""
    return canaries - canaries // PILOTS


def bound(positions: Matrix, coins: Coins, delta: float, claimed: float, confidence: float) -> Bound:
    """Return what right guesses of the coins prove about a claim, given one position (canaries,) each.

    A larger position means that a coin of 1 is likelier. A claimed epsilon of infinity claims nothing.
    """
    pilots = len(coins) // PILOTS
    known = coins[:pilots]
    means = [positions[:pilots][known == coin].mean() if (known == coin).any() else 0.0 for coin in (1, -1)]
    scores = positions - (means[0] + means[1]) / 2
    guesses = _best(scores[:pilots], known, len(coins) - pilots, delta, confidence)
    return prove(scores[pilots:], coins[pilots:], guesses, claimed, delta, confidence)


def _best(scores: Matrix, coins: Coins, canaries: int, delta: float, confidence: float) -> int:
    """Return how many of the other canaries to guess: the share that proves most among the pilots."""
    order = surest(scores, len(scores))
    right = np.cumsum(np.sign(scores[order]) == coins[order])
    sizes = np.unique(np.geomspace(min(8, len(scores)), len(scores), _SIZES).astype(np.int64))
    times = canaries / len(scores)
    proved = [
        lower_bound(canaries, max(1, round(size * times)), round(right[size - 1] * times), delta, confidence)
        for size in sizes
    ]
    # Of equal ones the largest: more guesses, fewer accidents.
    best = len(proved) - 1 - int(np.argmax(proved[::-1]))
    return max(1, round(float(sizes[best]) * times))
