"""The tables of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

from umbel.protocol.arrays import flatten
from umbel.server.history import last_rounds
from umbel.server.report.figures import key, number
from umbel.server.report.view import View
from umbel.server.summary import decimals
from umbel.server.worth import OWN_WAYS, STAYS, Arm, Worth, figure

_MAX_ROWS = 1000
_MAX_GROUPS = 12
_SMALL = 3  # parameters up to which hypotheses are printed


@dataclass(frozen=True)
class Table:
    """A table of the page; the first cell of a row is its heading."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]] = field(default_factory=list)
    marked: int | None = None
    note: str = ""


def hypotheses(view: View) -> Table:
    """Return the results of each hypothesis."""
    last, rest = last_rounds(view.history), view.others
    # Each column: its heading, a cell for each hypothesis that is shown, and one for the others.
    columns: list[tuple[str, list[Any], Any]] = [
        ("Hypothesis", [key(place) + f" {j}" for place, j in enumerate(view.shown)], key(None) + f" {len(rest)} others")
    ]

    def count(head: str, numbers: Sequence[Any]) -> None:
        columns.append((head, [f"{numbers[j]:,}" for j in view.shown], f"{sum(numbers[j] for j in rest):,}"))

    count("Picked in training" if view.disclosed else "Releases", view.groups.sum(axis=0).tolist())
    if last:
        count(f"In the last {len(last)} rounds", np.sum([entry.groups for entry in last], axis=0).tolist())
    if view.n <= _SMALL:
        rows = flatten(view.state.hypotheses)
        vectors = [f"({', '.join(f'{x:.3f}' for x in rows[j])})".replace("-", "\N{MINUS SIGN}") for j in view.shown]
        columns.append(("Parameters at the end", vectors, ""))
    heads, cells, others = zip(*columns, strict=True)
    note = "Training clients disclosed their choices." if view.disclosed else ""
    return Table(heads, [*zip(*cells, strict=True), *([others] if rest else [])], note=note)


def spread(view: View) -> Table | None:
    """Return the spread of clients at the last validation; None without reports."""
    last, summary = view.last_validated, view.summary
    if last is None or not last.loss_spread:
        return None
    head = ["Of 100 clients", summary.loss_name + summary.in_unit]
    columns = [[_shown(value * summary.factor) for value in last.loss_spread]]
    if view.metric_differs and last.metric_spread:
        head.append(summary.model.metric.name)
        columns.append([_shown(value) for value in last.metric_spread])
    which = ("the 10th", "the 25th", "the median", "the 75th", "the 90th")
    note = "At the last validation. Each column is sorted separately."
    return Table(head, list(zip(which, *columns, strict=True)), note=note)


def _shown(value: float) -> str:
    return "" if np.isnan(value) else number(value)


def worth(measured: Worth) -> Table:
    """Return the results of the run and of simpler ways, on held-out rows."""
    rows = [[worth_label(arm), figure(arm.mean), figure(arm.worst_decile)] for arm in measured.arms]
    note = "".join(f" Left out: {way.label}, {way.why}." for way in measured.left_out)
    unit = f" ({measured.unit})" if measured.unit else ""
    head = ["Who", f"{measured.metric}{unit}, mean", "Worst tenth"]
    return Table(head, rows, note=f"{measured.heading}.{note} {STAYS}")


def worth_label(arm: Arm) -> Markup:
    """Return the label of a way, in bold for the run's own, with its remark below."""
    label = Markup("<strong>{}</strong>" if arm.way in OWN_WAYS else "{}").format(arm.label)
    return label + (Markup('<br><span class="note">{}</span>').format(arm.remark) if arm.remark else "")


def rounds(view: View) -> Table:
    """Return the round-by-round table."""
    last, best = len(view.history) - 1, view.state.best_round
    every = -(-len(view.history) // _MAX_ROWS) or 1
    entries = [entry for i, entry in enumerate(view.history) if i % every == 0 or entry.number == best or i == last]
    head = ["Round", view.summary.loss_name + view.summary.in_unit]
    head += [view.summary.model.metric.name] if view.metric_differs else []
    head += ["Released", "To each hypothesis" if view.k <= _MAX_GROUPS else "Hypotheses trained"]
    head += ["Smallest distance", "Eq. 9"] if view.k > 1 else []
    head += ["Nodes lost", "Seconds"]
    rows = []
    for entry in entries:
        row = [str(entry.number) if entry.asked else "end"]
        row.append("" if entry.loss is None else view.summary.figure(entry.loss))
        if view.metric_differs:
            row.append("" if entry.metric is None else decimals(entry.metric))
        went = " + ".join(map(str, entry.groups))
        if view.k > _MAX_GROUPS:
            went = f"{sum(count > 0 for count in entry.groups)} of {view.k}"
        went = went if entry.moved else "not finite" if entry.undefined else "too few"
        row += [f"{entry.releases} of {entry.asked}", went] if entry.asked else ["", ""]
        row += [number(min(entry.nearest)), number(max(entry.ratio)) if entry.ratio else ""] if view.k > 1 else []
        rows.append([*row, str(entry.lost_nodes or ""), f"{entry.seconds:.2f}"])
    note = "Loss and distance are those at the start of the round."
    if view.k > 1:
        note += (
            " Eq. 9 of the paper assumes that the longest sanitised update is far shorter than that distance. The "
            "column shows the ratio of the two, the largest over hypotheses."
        )
    if every > 1:
        note += f" The table has every {every}th round; history.jsonl has all {len(view.history):,}."
    return Table(head, rows, next((i for i, entry in enumerate(entries) if entry.number == best), None), note)
