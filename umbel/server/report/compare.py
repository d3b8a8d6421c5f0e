"""A run beside others of the same data: their differences, with runs that differ only in the seed grouped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig
from umbel.server.report.figures import Line, number
from umbel.server.report.tables import Table
from umbel.server.report.view import HeldOut, View

MAX_KINDS = 7
"""Maximum number of other groups of runs in a report."""

# Settings that do not affect the result of a run.
_NO_MATTER = {"seed", "resume", "device", "observers", "track", "node-wait", "round-timeout"}
_NAMED = 3  # keys in a label


@dataclass(frozen=True)
class Runs:
    """Runs that differ only in their seeds.

    Attributes
    ----------
    label : str
        The differences from the report's own run.
    views : list of View
    """

    label: str
    views: list[View]

    @property
    def name(self) -> str:
        """The label, and the number of seeds."""
        return self.label if len(self.views) == 1 else f"{self.label}, {len(self.views)} seeds"

    def line(self) -> Line:
        """Return the validation loss in the rounds that all of them validated: its mean and range."""
        losses = [{entry.number: entry.loss or 0.0 for entry in view.validated} for view in self.views]
        rounds = sorted(set.intersection(*map(set, losses)))
        values = np.array([[one[number] for number in rounds] for one in losses]).reshape(len(losses), len(rounds))
        values *= self.views[0].summary.factor
        band = [] if len(losses) == 1 else [values.min(axis=0).tolist(), values.max(axis=0).tolist()]
        return Line(self.name, rounds, values.mean(axis=0).tolist(), *band)


def check(view: View, other: View) -> None:
    """Raise `ConfigError` if two runs cannot be compared: they have other data or another loss or metric."""

    def what(one: View) -> tuple[str, str, str]:
        data = one.summary.manifest.name if one.summary.manifest else "each site's own data"
        return data, one.summary.loss_name, one.summary.model.metric.name

    if what(view) != what(other):
        mine, theirs = (f"{data}, measured by {loss} and {metric}" for data, loss, metric in map(what, (view, other)))
        raise ConfigError(
            f"{other.name} is of {theirs}, but {view.name} of {mine}; compare runs of the same data",
            code="config.compare",
        )


def runs_of(view: View, others: Sequence[View]) -> list[Runs]:
    """Return the run with all that differ from it only in the seed, then the others, by kind."""
    kinds: dict[tuple[Any, ...], list[View]] = {}
    for one in (view, *others):
        kinds.setdefault(tuple(sorted(_kind(one).items())), []).append(one)
    own = _kind(view)
    runs = []
    for views in kinds.values():
        theirs = _kind(views[0])
        differs = [key for key in theirs if theirs[key] != own.get(key)]
        if "strategy" in differs and views[0].k == 1:
            differs = [key for key in differs if key != "hypotheses"]
        differs.sort(key=lambda key: key != "strategy")  # told first
        label = ", ".join(str(theirs[key]) if key == "strategy" else f"{key} {theirs[key]}" for key in differs[:_NAMED])
        if len(differs) > _NAMED:
            label += f" and {len(differs) - _NAMED} more"
        runs.append(Runs(label or "this run", views))
    return runs


def table(runs: Sequence[Runs], local_only: HeldOut | None) -> Table:
    """Return the results of runs side by side; for several seeds the mean and the range."""
    views = [view for one in runs for view in one.views]
    summary, differs = views[0].summary, views[0].metric_differs
    metric = summary.model.metric.name
    measured = local_only is not None or any(view.measured and view.measured.held_out for view in views)
    head = ["Run", f"Last validation {summary.loss_name}{summary.in_unit}"]
    head += [f"{metric} then"] if differs else []
    head += ["Best validation"]
    if measured:
        name = metric if differs else summary.loss_name
        head += [f"Held out: {name}{summary.in_unit if metric == 'rmse' else ''}", "Held out: worst tenth"]
    head += ["Epsilon, at most", "Paper's budget, at most (a heuristic)"]
    rows = []
    for one in runs:
        row = [one.name, _among([_last(view) for view in one.views])]
        row += [_among([_metric(view) for view in one.views])] if differs else []
        row += [_among([_best(view) for view in one.views])]
        if measured:
            held = [view.measured.held_out for view in one.views if view.measured and view.measured.held_out]
            for numbers in ([each.mean for each in held], [each.worst_decile for each in held]):
                row.append(_among([value * summary.metric_factor for value in numbers]))
        for most in ({view.epsilon for view in one.views}, {view.paper[1] for view in one.views}):
            ends = sorted(most, key=lambda text: np.inf if text == "none" else float(text))
            row.append(ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}")
        rows.append(row)
    if local_only is not None:
        alone = [number(value * summary.metric_factor) for value in (local_only.mean, local_only.worst_decile)]
        rows.append(["each client alone", "", "", *[""] * differs, *alone, "nothing leaves", ""])
    note = (
        "Held out: each validation client uses a random half of its rows to choose a hypothesis of the last round, or "
        "to train alone. The rest measures it, afterwards and only in simulation; a server sees no rows."
    )
    return Table(head, rows, note=note if measured else "")


def _kind(view: View) -> dict[str, Any]:
    defaults = RunConfig().entries()
    return {key: value for key, value in (defaults | dict(view.config)).items() if key not in _NO_MATTER}


def _best(view: View) -> float:
    return view.state.best_loss * view.summary.factor if view.state.best_round else np.nan


def _last(view: View) -> float:
    loss = view.last_validated.loss if view.last_validated else None
    return np.nan if loss is None else loss * view.summary.factor


def _metric(view: View) -> float:
    metric = view.last_validated.metric if view.last_validated else None
    return np.nan if metric is None else metric * view.summary.metric_factor


def _among(values: Sequence[float]) -> str:
    there = [value for value in values if not np.isnan(value)]
    if not there:
        return ""
    low, high = number(min(there)), number(max(there))
    return low if low == high else f"{number(float(np.mean(there)))} ({low} to {high})"
