"""A model's baselines, beside what its hypotheses reach on the same rows."""

from __future__ import annotations

from logging import INFO

from umbel.protocol.flower import log
from umbel.server.observer import Observer, Run, Section


class Baselines(Observer):
    """Says at the end of a run, and in its report, what the model's baselines reach (`umbel.models.hooks.Hooks`).

    Only in simulation, where all clients' rows can be read, and only of models that declare baselines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def at_end(self, run: Run) -> None:
        """Compare, where there is something to compare."""
        manifest, model = run.setup.manifest, run.setup.model
        if model.hooks.baselines is None or manifest is None or manifest.part:
            return
        if not (run.state.best_round and run.fleet.roster(run.grid).simulated):
            return
        dataset = run.setup.open_dataset()
        assert dataset is not None, "it has a manifest"
        found = model.hooks.baselines(dataset, model.metric.name)
        if not found:
            return
        scored = {entry.number: entry.metric for entry in run.state.history if entry.metric is not None}
        best, last = scored[run.state.best_round], scored[max(scored)]
        beside = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        self._text = (
            f"Validation {model.metric.name} of the best hypotheses {best:.4f}, of the last {last:.4f}. Baselines on "
            f"the same rows: {beside}."
        )
        log(INFO, self._text)

    def section(self) -> Section | None:
        """Return the comparison."""
        return Section("Beside baselines", (self._text,)) if self._text else None
