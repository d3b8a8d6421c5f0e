"""Federated averaging: one hypothesis for all (McMahan et al., 2017), unweighted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.arrays import Vectors
from umbel.strategies.base import HypothesisStrategy


class FedAvg(HypothesisStrategy):
    """Average all releases; clients do not tell their sample counts, so each counts once."""

    fixed_hypotheses = 1

    def assign(
        self, releases: Vectors, hypotheses: NDArray[np.float64], choices: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """Return hypothesis 0 for every release."""
        return np.zeros(len(releases), np.int64)
