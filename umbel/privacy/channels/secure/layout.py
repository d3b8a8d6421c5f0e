r"""The numbers of a secure sum, and how long a client's part of them is.

For k hypotheses of n parameters they are, in this order: the sums of the updates (k, n); the counts (k,); perhaps the
second moments of the updates, as far up as their diagonal (k, n (n + 1) / 2), or the diagonal alone (k, n) where n is
large; perhaps loss and metric of the clients that report.

Second moments cost nothing extra. Let all updates have norm r = 1 at most, and write a client's part as its update u,
a count c, and w u u^T, with the weights c^2 = w^2 = 1/2. Two data sets of the client that train the same hypothesis
differ by at most

    |u - v|^2 + w^2 |u u^T - v v^T|^2 <= (a + b)^2 + (a^2 - b^2)^2 / 2 <= 4,    a = |u|, b = |v|.

(With t = u.v, the left side is a^2 + b^2 + (a^4 + b^4) / 2 - 2 t - t^2, which is largest at t = -a b.) Two that train
different hypotheses differ by at most 2 + 2 c^2 + 2 w^2 = 4. So the distance is two clip norms, as without moments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.arrays import LARGEST_COVARIANCE
from umbel.protocol.errors import Refused

REPORTS = 2
"""Numbers for loss and metric."""
_WEIGHT = math.sqrt(0.5)
_COARSE = 0.1  # maximum share of a clip norm that rounding of second moments may take

Steps = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """The parts of a secure sum.

    Attributes
    ----------
    hypotheses, parameters : int
        k and n.
    moments, reports : bool
        Whether there are second moments, and loss and metric.
    """

    hypotheses: int
    parameters: int
    moments: bool = False
    reports: bool = False

    @classmethod
    def of(cls, hypotheses: Mapping[str, NDArray[Any]], moments: bool = False, reports: bool = False) -> Layout:
        r"""Return the layout for hypotheses, each array (k, \*shape)."""
        k = len(next(iter(hypotheses.values())))
        return cls(k, sum(value.size for value in hypotheses.values()) // k, moments, reports)

    @property
    def squares(self) -> int:
        """Number of second moments for each hypothesis."""
        n = self.parameters
        return 0 if not self.moments else n * (n + 1) // 2 if n <= LARGEST_COVARIANCE else n

    @property
    def updates(self) -> int:
        """Number of numbers about training."""
        return self.hypotheses * (self.parameters + 1 + self.squares)

    @property
    def length(self) -> int:
        """Number of all numbers."""
        return self.updates + (REPORTS if self.reports else 0)

    def inside(self, weight: float) -> float:
        """Return the share of the clip norm, of `weight` steps, to which updates are clipped and a count amounts.

        Second moments are rounded, so two clients' parts could be further apart than their exact values, by two times
        the root of the number of these. The share makes up for it.

        Raises
        ------
        Refused
            If a clip norm has too few steps.
        """
        lost = math.sqrt(self.squares) / weight
        if lost > _COARSE:
            text = f"a clip norm of {weight:.0f} steps is too coarse for the second moments of {self.parameters}"
            raise Refused(f"{text} parameters; make the grid finer", code="refused.secure-terms")
        return 1 - lost

    def count(self, weight: float) -> int:
        """Return what a client adds to a count, in steps."""
        return math.floor(weight * self.inside(weight) * (_WEIGHT if self.moments else 1.0))

    def squared(self, updates: Steps, weight: float) -> Steps:
        """Return the second moments (m, squares) of updates (m, n), both in steps, each rounded towards zero."""
        exact = updates.astype(np.float64)
        if self.parameters > LARGEST_COVARIANCE:
            return np.trunc(exact * exact * (_WEIGHT / weight)).astype(np.int64)
        rows, columns = np.triu_indices(self.parameters)
        # Each moment off the diagonal stands for two entries of the matrix.
        scale = np.where(rows == columns, _WEIGHT, 1.0) / weight
        return np.trunc(exact[:, rows] * exact[:, columns] * scale).astype(np.int64)

    def split(self, values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the sums (k, n), counts (k,) and second moments (k, squares) in a sum."""
        k, n = self.hypotheses, self.parameters
        sums, counts, squares = np.split(values[: self.updates], [k * n, k * n + k])
        return sums.reshape(k, n), counts, squares.reshape(k, self.squares)

    def matrices(self, squares: NDArray[Any], weight: float, step: float) -> NDArray[np.float64]:
        """Return summed second moments (k, squares) in the model's numbers, as (k, n, n), or (k, n) for many
        parameters."""
        n, unit = self.parameters, weight * step * step
        if n > LARGEST_COVARIANCE:
            return squares * (unit / _WEIGHT)
        rows, columns = np.triu_indices(n)
        found = np.zeros((len(squares), n, n))
        found[:, rows, columns] = squares * np.where(rows == columns, unit / _WEIGHT, unit)
        found[:, columns, rows] = found[:, rows, columns]
        return found
