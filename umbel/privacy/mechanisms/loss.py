"""Privacy losses: what one release reveals, from which `umbel.privacy.accounting` computes an epsilon at a delta."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from umbel.privacy.mechanisms.base import Matrix
from umbel.privacy.mechanisms.choice import keep_probability


class Loss(ABC):
    """The privacy loss of one release between two inputs; the same for adding and removing.

    With P and Q the distributions of the release for one input and the other, L = log(dP/dQ) under P. It is symmetric:
    log(dQ/dP) under Q has the distribution of L. Subclasses are frozen dataclasses, so that equal losses are
    counted and cached as one.
    """

    @property
    @abstractmethod
    def mean(self) -> float:
        """E[L]. Like `deviation` it only serves to choose a grid, so it may be approximate."""

    @property
    @abstractmethod
    def deviation(self) -> float:
        """Standard deviation of L."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest loss possible: epsilon at delta = 0; infinite for the Gaussian mechanism."""

    @abstractmethod
    def delta(self, epsilons: Matrix) -> Matrix:
        """Return the hockey-stick divergence delta(epsilon) = E[(1 - exp(epsilon - L))+].

        Accurate to 1e-12, and at epsilon >= 0 also to about nine digits: the accountant multiplies small values by the
        number of participations.

        Parameters
        ----------
        epsilons : ndarray, shape (m,)
            Any real numbers, in any order.

        Returns
        -------
        ndarray, shape (m,)
        """


def of_any_sign(epsilons: Matrix, positive: Matrix) -> Matrix:
    """Return delta at `epsilons` from `positive`, its values at their sizes: delta(-e) = 1 - exp(-e) + exp(-e)
    delta(e)."""
    size = np.abs(epsilons)
    delta: Matrix = np.where(epsilons >= 0, positive, np.exp(-size) * positive - np.expm1(-size))
    return delta


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
