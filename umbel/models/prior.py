"""The spread of clients' parameters around a hypothesis, as the server estimates it from the releases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.arrays import LARGEST_COVARIANCE, Arrays
from umbel.protocol.errors import ProtocolError

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Prior:
    """The covariance of clients' parameters around each hypothesis, up to a scale.

    Attributes
    ----------
    covariances : ndarray, shape (k, n, n), or (k, n) where only diagonals are known
        Of trace 0 for a hypothesis about which nothing is known.
    trust : ndarray, shape (k,)
        From 0 to 1: the share of a covariance's square that is not estimation error.
    """

    covariances: Matrix
    trust: Matrix

    @property
    def arrays(self) -> Arrays:
        """The prior in 32 bits, as it travels."""
        return {"covariances": self.covariances.astype(np.float32), "trust": self.trust.astype(np.float32)}

    @classmethod
    def read(cls, arrays: Arrays, k: int, n: int) -> Self:
        """Return the prior of k hypotheses of n parameters from received arrays.

        Raises
        ------
        ProtocolError
            If the shapes differ, a value is not finite, or a variance is negative.
        """
        found, trust = (np.asarray(arrays.get(name, 0), np.float64) for name in ("covariances", "trust"))
        shapes = (k, n), (k, n, n)
        sound = found.shape in shapes[: 2 if n <= LARGEST_COVARIANCE else 1] and trust.shape == (k,)
        if not sound or not np.isfinite(found).all() or not ((trust >= 0) & (trust <= 1)).all():
            raise ProtocolError(f"the prior does not fit {k} hypotheses of {n} parameters", code="protocol.prior")
        return cls(positive((found + found.mT) / 2 if found.ndim == 3 else found), trust)

    def with_public(self, public: Matrix) -> Matrix:
        """Return a public covariance of trace 1, (k, n, n) or (k, n), at most half of which this one replaces."""
        share = (self.trust / 2).reshape(-1, *[1] * (public.ndim - 1))
        own = self.diagonals if public.ndim == 2 else self.matrices
        return public + share * (own - public)

    @property
    def diagonals(self) -> Matrix:
        """The variances (k, n), with sum 1; equal where nothing is known."""
        found = self.covariances
        diagonals = found if found.ndim == 2 else np.diagonal(found, axis1=1, axis2=2)
        sums = diagonals.sum(1, keepdims=True)
        return np.where(sums > 0, diagonals / np.where(sums > 0, sums, 1.0), 1 / diagonals.shape[1])

    @property
    def matrices(self) -> Matrix:
        """The covariances (k, n, n), of trace 1; isotropic where nothing is known."""
        n = self.covariances.shape[-1]
        if self.covariances.ndim == 2:
            return self.diagonals[:, :, None] * np.eye(n)
        traces = np.trace(self.covariances, axis1=1, axis2=2)[:, None, None]
        return np.where(traces > 0, self.covariances / np.where(traces > 0, traces, 1.0), np.eye(n) / n)


def positive(covariances: Matrix) -> Matrix:
    """Return the nearest positive semidefinite matrices (k, n, n) (Higham, 1988), or nonnegative variances (k, n)."""
    if covariances.ndim == 2:
        return np.maximum(covariances, 0)
    values, vectors = np.linalg.eigh(covariances)
    return np.asarray((vectors * np.maximum(values, 0)[:, None]) @ vectors.transpose(0, 2, 1), np.float64)
