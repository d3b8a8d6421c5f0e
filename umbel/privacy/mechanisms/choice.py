"""k-ary randomised response: a client's choice of one of k hypotheses, sometimes replaced by a random one.

A client with OWN trains the hypothesis that fits it best; a client with a number trains that hypothesis. Together
P(best) = e^eps/(e^eps + k - 1) and each other has 1/(e^eps + k - 1). So eps bounds the privacy loss, also against a
reader of the choice who knows eps and k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umbel.privacy.mechanisms.base import Loss, Matrix, NoiseSource

OWN = -1
"""Train the hypothesis that fits you best."""


def keep_probability(epsilon: float, k: int) -> float:
    """Return the probability of OWN, (e^eps - 1)/(e^eps + k - 1); raise `ValueError` unless eps >= 0 and k >= 1."""
    if not (epsilon >= 0 and k >= 1):
        raise ValueError(f"randomised response needs epsilon >= 0 and k >= 1, got {epsilon} and {k}")
    return -math.expm1(-epsilon) / (1 + (k - 1) * math.exp(-epsilon))


def draw(epsilon: float, k: int, sources: Iterable[NoiseSource]) -> NDArray[np.int64]:
    """Return for each client OWN, or the number of the hypothesis that it trains, shape (clients,).

    Each client's source always gives two numbers, even if one would suffice.
    """
    return at_random(1 - keep_probability(epsilon, k), k, sources)


def at_random(share: float, k: int, sources: Iterable[NoiseSource]) -> NDArray[np.int64]:
    """Return for each client OWN, or with probability `share` one of all k hypotheses; it draws like `draw`."""
    keep = 1 - share
    choices = [OWN if first < keep else int(second * k) for first, second in (source.random(2) for source in sources)]
    # A second number next to 1 times k may round to k.
    return np.minimum(np.array(choices, np.int64), k - 1)


@dataclass(frozen=True)
class RandomisedResponse(Loss):
    """The loss of one choice: eps with probability p, -eps with q = p e^-eps, 0 with the other (k - 2) q.

    A choice with k = 1 reveals nothing.
    """

    epsilon: float
    k: int

    def __post_init__(self) -> None:
        keep_probability(self.epsilon, self.k)

    @property
    def _best(self) -> float:
        return 1 / (1 + (self.k - 1) * math.exp(-self.epsilon))

    @property
    def mean(self) -> float:
        return self.largest * self._best * -math.expm1(-self.epsilon)

    @property
    def deviation(self) -> float:
        best, other = self._best, self._best * math.exp(-self.epsilon)
        # p + q - (p - q)^2 as a sum of nonnegative terms, since 1 - p = (k - 1) q.
        return self.largest * math.sqrt(other * ((self.k + 1) * best + 1 - other))

    @property
    def largest(self) -> float:
        return self.epsilon if self.k > 1 else 0.0

    def delta(self, epsilons: Matrix) -> Matrix:
        epsilons = np.asarray(epsilons, np.float64)
        if self.k == 1:
            return _excess(epsilons)
        best = self._best
        other = best * math.exp(-self.epsilon)
        return (
            best * _excess(epsilons - self.epsilon)
            + (self.k - 2) * other * _excess(epsilons)
            + other * _excess(epsilons + self.epsilon)
        )


def _excess(exponents: Matrix) -> Matrix:
    """Return (1 - exp(x))+."""
    excess: Matrix = -np.expm1(np.minimum(exponents, 0.0))
    return excess
