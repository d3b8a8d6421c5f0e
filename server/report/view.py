"""What a report is made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.release import RadiusMode
from server.history import State
from server.report.alarms import count_of
from server.report.figures import number
from server.report.style import STYLED
from server.snapshots import Snapshots
from server.summary import Summary


class View:
    """What a report is made from, and what is worked out from it more than once.

    Parameters
    ----------
    summary : Summary
    state : State
    participations : ndarray of int
        How often each training client released.
    snapshots : Snapshots
    config : mapping
        The run config.
    """

    def __init__(
        self,
        summary: Summary,
        state: State,
        participations: NDArray[np.int64],
        snapshots: Snapshots,
        config: Mapping[str, Any],
    ) -> None:
        self.summary, self.state, self.snapshots, self.config = summary, state, snapshots, config
        self.participations = participations
        self.history = state.history
        self.trained = [entry for entry in self.history if entry.asked]
        self.k = len(next(iter(state.best.values())))
        self.n = summary.model.num_parameters
        self.groups = np.array([entry.groups for entry in self.trained], np.int64).reshape(len(self.trained), self.k)
        busiest = np.argsort(-self.groups.sum(axis=0), kind="stable")[:STYLED]
        self.shown: list[int] = list(range(self.k)) if self.k <= STYLED else sorted(int(j) for j in busiest)
        self.sanitised = summary.release.cost is not None

    def spent(self) -> tuple[float, float]:
        """Return the median and the largest spend of a training client."""
        if not len(self.participations):
            return 0.0, 0.0
        median, maximum = float(np.median(self.participations)), int(self.participations.max())
        return self.summary.release.spend(median), self.summary.release.spend(maximum)

    def multiplier(self) -> str:
        """Return nu as text."""
        cost = self.summary.release.cost
        return number(float(self.n / cost)) if cost else "0"

    def kind(self) -> str:
        """Return what the spend is worth, in a few words."""
        if not self.sanitised:
            return "unsanitised: no noise"
        return (
            "heuristic, no guarantee"
            if self.summary.release.radius_mode is RadiusMode.UPDATE
            else "guarantee, one radius apart"
        )

    def metric_differs(self) -> bool:
        """Return whether the metric is another than the loss."""
        return self.summary.model.metric.name.lower() != self.summary.loss_name.lower()

    def best_when(self) -> str:
        """Return after how much training the best hypotheses came."""
        done = self.state.best_round - 1
        return f"after {count_of(done, 'round')} of training" if done else "before any training"
