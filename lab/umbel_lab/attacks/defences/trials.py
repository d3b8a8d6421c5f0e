"""Canaries for a target: updates as far apart as the claim allows, and a lower bound on epsilon from counted guesses.

Each canary has a coin, which selects one of two opposite updates, far longer than the clip norm. The auditor sees the
releases and guesses the coin from their position along the line between the two. The first canaries fix the position
and the number of guesses; the bound counts only the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umbel_lab.attacks.audit.bounds import count_right, lower_bound, surest
from umbel_lab.attacks.audit.bounds import p_value as chance_of
from umbel_lab.attacks.audit.findings import Bound
from umbel_lab.attacks.defences.process import Seen, Worker

Matrix = NDArray[np.float64]

BEYOND = 1000.0
"""Length of an update, in clip norms, if the target clips it."""

_PILOTS = 4  # one canary in this many
_SIZES = 40  # numbers of guesses that the pilots try
_COINS = 212  # purpose of draws


@dataclass(frozen=True)
class Line:
    """Canaries whose two updates are opposite, along a unit vector.

    Attributes
    ----------
    name : str
        For people.
    direction : array (n,)
        The unit vector.
    coins : array (canaries,)
        1 or -1.
    seen : Seen
        The releases.
    """

    name: str
    direction: Matrix
    coins: NDArray[np.int64]
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


def directions(n: int) -> dict[str, Matrix]:
    """Return the unit vectors (n,) of the two lines."""
    one = np.zeros(n)
    one[0] = 1.0
    return {"one value": one, "all values": np.full(n, n**-0.5)}


def draw(worker: Worker, direction: Matrix, name: str, length: float, canaries: int, rounds: int, seed: int) -> Line:
    """Send canaries with updates of a length through the target."""
    coins = 2 * np.random.default_rng([seed, _COINS]).integers(2, size=canaries) - 1
    seen = worker.run(np.stack([length * direction, -length * direction]), np.where(coins > 0, 0, 1), rounds)
    return Line(name, direction, coins, seen)


def judged(canaries: int) -> int:
    """Return how many of the canaries are not pilots."""
    return canaries - canaries // _PILOTS


def bound(positions: Matrix, coins: NDArray[np.int64], delta: float, claimed: float, confidence: float) -> Bound:
    """Return what right guesses of the coins prove, given one position (canaries,) each.

    Parameters
    ----------
    positions : array (canaries,)
        The larger, the likelier a coin of 1.
    delta, claimed : float
        The claim; an epsilon of infinity claims nothing.
    confidence : float
        Of the bound.
    """
    pilots = len(coins) // _PILOTS
    some, known = positions[:pilots], coins[:pilots]
    means = [some[known == coin].mean() if (known == coin).any() else 0.0 for coin in (1, -1)]
    scores = positions - (means[0] + means[1]) / 2
    guesses = _best(scores[:pilots], known, len(coins) - pilots, delta, confidence)
    right = count_right(scores[pilots:], coins[pilots:], guesses)
    m = judged(len(coins))
    chance = 1.0 if np.isinf(claimed) else chance_of(m, guesses, right, claimed, delta)
    return Bound(delta, claimed, lower_bound(m, guesses, right, delta, confidence), guesses, right, chance)


def _best(scores: Matrix, coins: NDArray[np.int64], canaries: int, delta: float, confidence: float) -> int:
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
