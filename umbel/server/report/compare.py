"""A run beside others of the same data: what sets them apart, and seeds of one kind together."""

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
"""Kinds of runs that can be told apart beside the report's own."""

# What plays no part in what a run learns.
_NO_MATTER = {"seed", "resume", "device", "engine", "observers", "track", "track-options", "node-wait", "round-timeout"}
_NAMED = 3  # keys in a label


@dataclass(frozen=True)
class Runs:
    """Runs that differ in their seed alone.

    Attributes
    ----------
    label : str
        What sets them apart from the report's own run.
    views : list of View
    """

    label: str
    views: list[View]

    @property
    def name(self) -> str:
        """The label, and how many seeds there are."""
        return self.label if len(self.views) == 1 else f"{self.label}, {len(self.views)} seeds"

    def line(self) -> Line:
        """Return the validation loss in the rounds that all of them validated: its mean, and between which it lies."""
        factor = self.views[0].summary.scale[0] or 1.0
        losses = [
            {entry.number: entry.loss * factor for entry in view.history if entry.loss is not None}
            for view in self.views
        ]
        rounds = sorted(set.intersection(*map(set, losses)))
        values = np.array([[one[number] for number in rounds] for one in losses]).reshape(len(losses), len(rounds))
        if len(losses) == 1:
            return Line(self.name, rounds, values[0].tolist())
        return Line(
            self.name, rounds, values.mean(axis=0).tolist(), values.min(axis=0).tolist(), values.max(axis=0).tolist()
        )


def check(view: View, other: View) -> None:
    """Raise `ConfigError` where two runs cannot be compared: they are of other data, or measured otherwise."""

    def what(one: View) -> tuple[str, str, str]:
        data = one.summary.manifest.name if one.summary.manifest else "each site's own data"
        return data, one.summary.loss_name, one.summary.model.metric.name

    if what(view) != what(other):
        mine, theirs = (f"{data}, measured by {loss} and {metric}" for data, loss, metric in map(what, (view, other)))
        raise ConfigError(
            f"{other.name} is of {theirs}, and {view.name} of {mine}: compare runs of the same data",
            code="config.compare",
        )


def runs_of(view: View, others: Sequence[View]) -> list[Runs]:
    """Return a run with all that differ from it in the seed alone, then the others, kind by kind."""
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
        # Told first: the strategy.
        differs.sort(key=lambda key: key != "strategy")
        label = ", ".join(str(theirs[key]) if key == "strategy" else f"{key} {theirs[key]}" for key in differs[:_NAMED])
        if len(differs) > _NAMED:
            label += f" and {len(differs) - _NAMED} more"
        runs.append(Runs(label or "this run", views))
    return runs


def table(runs: Sequence[Runs], local_only: HeldOut | None) -> Table:
    """Return what came out of runs side by side; of several seeds the mean, and from where to where they lie."""
    view = runs[0].views[0]
    unit, metric = view.summary.scale[1], view.summary.model.metric.name
    in_unit = f" ({unit})" if unit else ""
    differs = view.metric_differs()
    name = metric if differs else view.summary.loss_name
    measured = local_only is not None or any(one.measured and one.measured.held_out for one in _all(runs))
    factor = view.summary.scale[0] if metric == "rmse" and view.summary.scale[0] else 1.0
    head = ["Run", f"Best validation {view.summary.loss_name}{in_unit}"]
    head += [f"{metric} then"] if differs else []
    head += [f"Held out: {name}{in_unit if metric == 'rmse' else ''}", "and of the worst tenth"] if measured else []
    head += ["Epsilon, at most", "Paper's budget, at most (a heuristic)"]
    rows = []
    for one in runs:
        row = [one.name, _among([_best(view) for view in one.views])]
        row += [_among([_metric(view) for view in one.views])] if differs else []
        if measured:
            held = [view.measured.held_out for view in one.views if view.measured and view.measured.held_out]
            row += [
                _among([each.mean * factor for each in held]),
                _among([each.worst_decile * factor for each in held]),
            ]
        for getter in (View.epsilons, View.paper):
            ends = sorted({getter(view)[1] for view in one.views}, key=_order)
            row.append(ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}")
        rows.append(row)
    if local_only is not None:
        alone = [number(local_only.mean * factor), number(local_only.worst_decile * factor)]
        rows.append(["each client by itself", "", *[""] * differs, *alone, "nothing leaves", ""])
    note = ""
    if measured:
        note = (
            "Held out: each validation client picks by, or trains itself on, every other row of its own, and is "
            "measured on the rest. This was measured afterwards, in this simulation; a server sees no rows."
        )
    return Table(head, rows, note=note)


def _kind(view: View) -> dict[str, Any]:
    defaults = RunConfig().entries()
    return {key: value for key, value in (defaults | dict(view.config)).items() if key not in _NO_MATTER}


def _all(runs: Sequence[Runs]) -> list[View]:
    return [view for one in runs for view in one.views]


def _best(view: View) -> float:
    return view.state.best_loss * (view.summary.scale[0] or 1.0) if view.state.best_round else np.nan


def _metric(view: View) -> float:
    entry = view.best
    metric = entry.metric if entry is not None and entry.metric is not None else np.nan
    return metric * (view.summary.scale[0] or 1.0) if view.summary.model.metric.name == "rmse" else metric


def _among(values: Sequence[float]) -> str:
    there = [value for value in values if not np.isnan(value)]
    if not there:
        return ""
    low, high = number(min(there)), number(max(there))
    return low if low == high else f"{number(float(np.mean(there)))} ({low} to {high})"


def _order(text: str) -> tuple[int, float]:
    try:
        return 0, float(text)
    except ValueError:
        return 1, 0.0
