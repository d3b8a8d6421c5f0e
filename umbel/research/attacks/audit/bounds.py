"""What right guesses say of epsilon: the statistics of auditing in one run (Steinke, Nasr and Jagielski, 2023).

Each of m canaries flips a fair coin, and an auditor who sees what leaves guesses r of the coins; of the rest it
says nothing. Under a pure epsilon each guess is right with probability at most q = e^eps / (1 + e^eps), whatever
the other coins and guesses are, so P[v or more are right] <= P[W >= v] with W binomial(r, q) (Proposition 5.1).

Under (epsilon, delta) the paper adds 2 m delta max_i P[v > W >= v - i] / i (Theorem 5.2, r being fixed in advance),
since in one training run what delta covers may befall all canaries together. Here each canary is a mechanism of its
own. Two laws that are (epsilon, delta)-close are mixtures, with weight 1 - delta of two that are epsilon-close and
with weight delta of any two (Kairouz, Oh and Viswanath, 2015). So N binomial(m, delta) of the canaries, independent
of the coins, may give theirs away, and Proposition 5.1 holds for the others whatever these are:

    P[v or more are right] <= P[N + W >= v],  N and W independent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

_LARGEST = 700.0  # of an epsilon, whose exponential is still a float


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float = 0.0) -> float:
    """Return a bound on the probability of so many right guesses, or more, where (epsilon, delta) holds.

    These are m, r and v: ``0 <= right <= guesses <= canaries``.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"of {canaries} canaries, {guesses} cannot be guessed and {right} guessed right")
    if right == 0:
        return 1.0
    chance = float(special.expit(epsilon))
    if not delta:
        return float(special.betainc(right, guesses - right + 1, chance))
    # Of more than these the probability is added as it is: at most right - 1, or far beyond what is to be expected.
    away = np.arange(min(right, int(canaries * delta + 40 * np.sqrt(canaries * delta) + 40)))
    given = np.diff(special.bdtr(away, canaries, delta), prepend=0.0)
    others = special.betainc(right - away, guesses - right + away + 1, chance)
    return min(1.0, float(given @ others + special.bdtrc(away[-1], canaries, delta)))


def lower_bound(canaries: int, guesses: int, right: int, delta: float = 0.0, confidence: float = 0.95) -> float:
    """Return the epsilon below which so many right guesses are less probable than ``1 - confidence``; 0 for none."""
    if right == 0:
        return 0.0
    alpha = 1 - confidence
    pure = min(float(special.logit(special.betaincinv(right, guesses - right + 1, alpha))), _LARGEST)

    def excess(epsilon: float) -> float:
        return p_value(canaries, guesses, right, epsilon, delta) - alpha

    if not delta or pure <= 0:
        return max(0.0, pure)
    # The bound at delta 0 is the larger; its own rounding must not come between.
    return float(optimize.brentq(excess, 0.0, pure + 1e-6, xtol=1e-7)) if excess(0.0) < 0 else 0.0


def best_guesses(scores: NDArray[np.float64], canaries: int, delta: float = 0.0, confidence: float = 0.95) -> int:
    """Return of how many of the canaries to guess the coin, by others' scores (pilots,); far from 0 is sure.

    Where the mechanism is as claimed, and a score s the log likelihood ratio of a coin, the surer guess is right with
    probability 1 / (1 + e^-|s|). So without a look at any coin it is known how many of the surest are right on average,
    and what bound that gives.
    """
    pilots = len(scores)
    right = np.cumsum(special.expit(np.abs(scores)[surest(scores, pilots)]))
    sizes = np.unique(np.geomspace(min(_FEWEST, pilots), pilots, _SIZES).astype(np.int64))
    guesses = np.maximum(1, np.rint(sizes * (canaries / pilots)))
    # What delta explains on average is taken off, so that few sure guesses are not preferred for it.
    some = np.maximum(guesses * right[sizes - 1] / sizes - canaries * delta, 1e-3)
    chances = special.betaincinv(some, guesses - some + 1, 1 - confidence)
    return int(guesses[np.argmax(chances)])


_FEWEST, _SIZES = 5, 60  # pilots that guesses are counted by: from how many, and how many numbers of them


def surest(scores: NDArray[np.float64], guesses: int) -> NDArray[np.int64]:
    """Return the places of the `guesses` scores furthest from 0, the first of equal ones first."""
    return np.argsort(-np.abs(scores), kind="stable")[:guesses]


def count_right(scores: NDArray[np.float64], coins: NDArray[np.int64], guesses: int) -> int:
    """Return how many of the surest guesses are right; a score of 0 is no guess, and counts as wrong."""
    chosen = surest(scores, guesses)
    return int((np.sign(scores[chosen]) == coins[chosen]).sum())


def most(guesses: int, confidence: float = 0.95) -> float:
    """Return the largest bound that so many guesses can give: all of them right, at delta 0."""
    return lower_bound(guesses, guesses, guesses, confidence=confidence)
