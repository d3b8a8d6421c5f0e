"""The tables of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from umbel.protocol.arrays import flatten
from umbel.server.history import last_rounds
from umbel.server.report.figures import number
from umbel.server.report.style import key
from umbel.server.report.view import View

_MAX_ROWS = 1000
_MAX_GROUPS = 12
_SMALL = 3  # hypotheses of so many parameters are printed


@dataclass(frozen=True)
class Table:
    """A table of the page; the first cell of a row is its heading."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]] = field(default_factory=list)
    marked: int | None = None
    note: str = ""


def hypotheses(view: View) -> Table:
    """Return what became of each hypothesis."""
    totals = view.groups.sum(axis=0) if view.groups.size else np.zeros(view.k, np.int64)
    last = last_rounds(view.history)
    ends = np.sum([entry.groups for entry in last], axis=0) if last else np.zeros(view.k, np.int64)
    small = view.n <= _SMALL
    vectors = flatten(view.state.best) if small else None
    head = ["Hypothesis", "Picked in training" if view.disclosed else "Releases"]
    head += [f"In the last {len(last)} rounds"] if last else []
    picks = view.measured if view.measured is not None and len(view.measured.picked) == view.k else None
    factor, unit = view.summary.scale
    loss = f"{view.summary.loss_name}" + (f" ({unit})" if unit else "")
    head += ["Validation clients that it fits best", f"Their {loss}", f"{loss} of all"] if picks else []
    head += ["Parameters at best" if view.state.best_round else "Parameters"] if small else []
    rows: list[list[Any]] = []
    for place, j in enumerate(view.shown):
        row: list[Any] = [key(place) + f" {j}", f"{totals[j]:,}"]
        row += [f"{ends[j]:,}"] if last else []
        if picks:
            row.append(f"{picks.picked[j]:,}")
            row += [_shown(one[j] * (factor or 1.0)) for one in (picks.own, picks.all)]
        if vectors is not None:
            row.append(f"({', '.join(f'{x:.3f}' for x in vectors[j])})".replace("-", "\N{MINUS SIGN}"))
        rows.append(row)
    if rest := [j for j in range(view.k) if j not in view.shown]:
        row = [key(None) + f" {len(rest)} others", f"{totals[rest].sum():,}"]
        row += [f"{ends[rest].sum():,}"] if last else []
        row += [f"{sum(picks.picked[j] for j in rest):,}", "", ""] if picks else []
        row += [""] if small else []
        rows.append(row)
    note = "What training clients chose, as they said themselves." if view.disclosed else ""
    if picks:
        note += (
            f" {'Fits' if view.disclosed else 'Which hypothesis fits'} whom was measured afterwards, on the validation "
            "clients' rows in this simulation; a server sees no rows, and no client says which it picks."
        )
    return Table(head, rows, note=note.strip())


def spread(view: View) -> Table | None:
    """Return how the validation clients of the best round differ; None where none reported."""
    best = view.best
    if best is None or not best.loss_spread:
        return None
    factor, unit = view.summary.scale
    loss = view.summary.loss_name + (f" ({unit})" if unit else "")
    head, columns = ["Of 100 clients", loss], [[_shown(value * (factor or 1.0)) for value in best.loss_spread]]
    if view.metric_differs() and best.metric_spread:
        head.append(view.summary.model.metric.name)
        columns.append([_shown(value) for value in best.metric_spread])
    which = ("the 10th", "the 25th", "the one in the middle", "the 75th", "the 90th")
    note = f"In round {best.number}, with the best hypotheses, each column in order of its own numbers."
    return Table(head, [list(row) for row in zip(which, *columns, strict=True)], note=note)


def _shown(value: float) -> str:
    return "" if np.isnan(value) else number(value)


def rounds(view: View) -> Table:
    """Return the round-by-round table."""
    factor, unit = view.summary.scale
    differs = view.metric_differs()
    every = -(-len(view.history) // _MAX_ROWS) or 1
    entries = [
        entry
        for i, entry in enumerate(view.history)
        if i % every == 0 or entry.number == view.state.best_round or i == len(view.history) - 1
    ]
    head = ["Round", view.summary.loss_name + (f" ({unit})" if unit else "")]
    head += [view.summary.model.metric.name] if differs else []
    head += ["Released", "To each hypothesis" if view.k <= _MAX_GROUPS else "Hypotheses trained"]
    head += ["Smallest distance", "Eq. 9"] if view.k > 1 else []
    head += ["Nodes lost", "Seconds"]
    rows, marked = [], None
    for i, entry in enumerate(entries):
        if entry.number == view.state.best_round:
            marked = i
        loss = None if entry.loss is None else entry.loss * (factor or 1.0)
        row = [str(entry.number) if entry.asked else "end"]
        row.append("" if loss is None else f"{loss:,.1f}" if factor else f"{loss:.4f}")
        row += ["" if entry.metric is None else f"{entry.metric:.4f}"] if differs else []
        if not entry.asked:
            row += ["", ""]
        else:
            went = " + ".join(map(str, entry.groups))
            if view.k > _MAX_GROUPS:
                went = f"{sum(count > 0 for count in entry.groups)} of {view.k}"
            row += [f"{entry.releases} of {entry.asked}", went if entry.moved else "too few"]
        row += [number(min(entry.nearest)), number(max(entry.ratio)) if entry.ratio else ""] if view.k > 1 else []
        row += [str(entry.lost_nodes or ""), f"{entry.seconds:.2f}"]
        rows.append(row)
    note = "Loss and distance are those of the hypotheses that a round started from."
    if view.k > 1:
        note += (
            " Eq. 9 of the paper assumes that the longest sanitised update is far shorter than that distance: the "
            "column has the one as a part of the other, the largest over hypotheses."
        )
    if every > 1:
        note += f" Every {every}th round; history.jsonl has all {len(view.history):,}."
    return Table(head, rows, marked, note)
