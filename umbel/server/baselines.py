"""Beside what a recommender reaches: what baselines reach on the same rows."""

from __future__ import annotations

from logging import INFO

from umbel.models.baselines import baselines
from umbel.models.factors import Factors
from umbel.protocol.flower import log
from umbel.server.observer import Observer, Run, Section


class RulesOfThumb(Observer):
    """Says at the end of a recommender's run, and in its report, what it is to be compared with.

    Only in simulation, where all clients' rows can be read; it says nothing of other models.
    """

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def at_end(self, run: Run) -> None:
        """Compare, where there is something to compare."""
        manifest = run.setup.manifest
        if not isinstance(run.setup.model.module, Factors) or manifest is None or manifest.part:
            return
        if not (run.state.best_round and run.fleet.roster(run.grid).simulated):
            return
        metric = run.setup.model.metric
        if metric.name != "right-sign":
            return
        scored = {entry.number: entry.metric for entry in run.state.history if entry.metric is not None}
        best, last = scored[run.state.best_round], scored[max(scored)]
        dataset = run.setup.open_dataset()
        assert dataset is not None, "it has a manifest"
        beside = ", ".join(f"{name} {value:.4f}" for name, value in baselines(dataset).items())
        self._text = (
            f"Validation {metric.name} of the best items {best:.4f}, of the last {last:.4f}. Baselines on the "
            f"same rows: {beside}."
        )
        log(INFO, self._text)

    def section(self) -> Section | None:
        """Return the comparison."""
        return Section("Beside baselines", (self._text,)) if self._text else None
