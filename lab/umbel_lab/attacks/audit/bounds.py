"""Bounds on epsilon from right guesses: the statistics of auditing in one run (Steinke, Nasr and Jagielski, 2023).

Each of m canaries flips a fair coin. An auditor who sees the messages that leave guesses r of the coins, and abstains
on the rest. Under a pure epsilon each guess is right with probability at most q = e^eps / (1 + e^eps), for any other
coins and guesses, so P[v or more are right] <= P[W >= v] with W binomial(r, q) (Proposition 5.1).

Under (epsilon, delta) the paper adds 2 m delta max_i P[v > W >= v - i] / i (Theorem 5.2, r being fixed in advance),
since in one training run what delta covers may befall all canaries together. Here each canary is a separate
mechanism. Two laws that are (epsilon, delta)-close are mixtures, with weight 1 - delta of two that are epsilon-close
and with weight delta of any two (Kairouz, Oh and Viswanath, 2015). So N binomial(m, delta) of the canaries, independent
of the coins, may reveal theirs, and for any such N canaries Proposition 5.1 holds for the others:

    P[v or more are right] <= P[N + W >= v],  N and W independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

CONFIDENCE = 0.95
"""Confidence of each lower bound."""

ALARM = 1e-6
"""A claim counts as refuted if the right guesses have a probability below this under it."""

PILOTS = 4
"""One canary in this many only helps to decide how many coins to guess."""

_LARGEST = 700.0  # of an epsilon, whose exponential is still a float


class Verdict(StrEnum):
    """The verdict of a lower bound on a claim."""

    WITHIN = "within the claim"
    CHANCE = "above, perhaps by chance"
    EXCEEDS = "EXCEEDS THE CLAIM"


@dataclass(frozen=True)
class Bound:
    """The claim at a delta, infinite for none, and the lower bound that right guesses about canaries give.

    `chance` bounds the probability of so many right guesses if the claim is true.
    """

    delta: float
    claimed: float
    shown: float
    guesses: int
    right: int
    chance: float

    @property
    def verdict(self) -> Verdict:
        """The verdict."""
        if self.shown <= self.claimed:
            return Verdict.WITHIN
        return Verdict.EXCEEDS if self.chance < ALARM else Verdict.CHANCE


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float = 0.0) -> float:
    """Return a bound on the probability of so many right guesses, or more, if (epsilon, delta) holds.

    These are m, r and v: ``0 <= right <= guesses <= canaries``.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"of {canaries} canaries, {guesses} cannot be guessed and {right} guessed right")
    if right == 0:
        return 1.0
    chance = float(special.expit(epsilon))
    if not delta:
        return float(special.betainc(right, guesses - right + 1, chance))
    # Beyond this number the probability is simply added: at most right - 1, or far more than expected.
    away = np.arange(min(right, int(canaries * delta + 40 * np.sqrt(canaries * delta) + 40)))
    given = np.diff(special.bdtr(away, canaries, delta), prepend=0.0)
    others = special.betainc(right - away, guesses - right + away + 1, chance)
    return min(1.0, float(given @ others + special.bdtrc(away[-1], canaries, delta)))


def lower_bound(canaries: int, guesses: int, right: int, delta: float = 0.0, confidence: float = 0.95) -> float:
    """Return the epsilon below which so many right guesses have probability below ``1 - confidence``; 0 if there is
    none."""
    if right == 0:
        return 0.0
    alpha = 1 - confidence
    pure = min(float(special.logit(special.betaincinv(right, guesses - right + 1, alpha))), _LARGEST)

    def excess(epsilon: float) -> float:
        return p_value(canaries, guesses, right, epsilon, delta) - alpha

    if not delta or pure <= 0:
        return max(0.0, pure)
    # The bound at delta 0 is the larger; its rounding must not interfere.
    return float(optimize.brentq(excess, 0.0, pure + 1e-6, xtol=1e-7)) if excess(0.0) < 0 else 0.0


def best_guesses(scores: NDArray[np.float64], canaries: int, delta: float = 0.0, confidence: float = 0.95) -> int:
    """Return for how many canaries to guess the coin, from other canaries' scores (pilots,); far from 0 is sure.

    If the mechanism is as claimed, and a score s is the log likelihood ratio of a coin, the surer guess is right with
    probability 1 / (1 + e^-|s|). So without looking at any coin it is known how many of the surest guesses are right on
    average, and which bound that gives.
    """
    pilots = len(scores)
    right = np.cumsum(special.expit(np.abs(scores)[surest(scores, pilots)]))
    sizes = np.unique(np.geomspace(min(_FEWEST, pilots), pilots, _SIZES).astype(np.int64))
    guesses = np.maximum(1, np.rint(sizes * (canaries / pilots)))
    # The average effect of delta is subtracted, so that it does not favour a few sure guesses.
    some = np.maximum(guesses * right[sizes - 1] / sizes - canaries * delta, 1e-3)
    chances = special.betaincinv(some, guesses - some + 1, 1 - confidence)
    return int(guesses[np.argmax(chances)])


_FEWEST, _SIZES = 5, 60  # candidate numbers of pilots to guess: the smallest, and how many candidates


def surest(scores: NDArray[np.float64], guesses: int) -> NDArray[np.int64]:
    """Return the positions of the `guesses` scores furthest from 0, the first of equal ones first."""
    return np.argsort(-np.abs(scores), kind="stable")[:guesses]


def count_right(scores: NDArray[np.float64], coins: NDArray[np.int64], guesses: int) -> int:
    """Return how many of the surest guesses are right; a score of 0 is not a guess, and counts as wrong."""
    chosen = surest(scores, guesses)
    return int((np.sign(scores[chosen]) == coins[chosen]).sum())


def most(guesses: int, confidence: float = 0.95) -> float:
    """Return the largest bound that so many guesses can give: if all are right, at delta 0."""
    return lower_bound(guesses, guesses, guesses, confidence=confidence)


def prove(
    scores: NDArray[np.float64], coins: NDArray[np.int64], guesses: int, claimed: float, delta: float, confidence: float
) -> Bound:
    """Return what the surest guesses say of a claim; a claimed epsilon of infinity claims nothing."""
    canaries, right = len(coins), count_right(scores, coins, guesses)
    chance = 1.0 if math.isinf(claimed) else p_value(canaries, guesses, right, claimed, delta)
    return Bound(delta, claimed, lower_bound(canaries, guesses, right, delta, confidence), guesses, right, chance)
