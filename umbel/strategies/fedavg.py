"""Federated averaging: one hypothesis for all (McMahan et al., 2017), unweighted."""

from __future__ import annotations

import numpy as np

from umbel.protocol.arrays import Labels, Matrix, Vectors
from umbel.strategies.base import HypothesisStrategy


class FedAvg(HypothesisStrategy):
    """Average all releases; clients do not tell their sample counts, so each counts once."""

    fixed_hypotheses = 1

    def assign(self, releases: Vectors, hypotheses: Matrix, choices: Labels | None) -> Labels:
        """Return hypothesis 0 for every release."""
        return np.zeros(len(releases), np.int64)
