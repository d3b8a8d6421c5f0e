"""The pictures of a report, each with a description in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from umbel.protocol.words import count_of
from umbel.server.history import Round
from umbel.server.report import figures
from umbel.server.report.figures import number
from umbel.server.report.view import View

# Meaning of a release, by whether a site makes it and whether there is noise.
_RELEASED = {
    (False, True): "A release is a client's trained model with noise; the server assigned it to a hypothesis.",
    (False, False): "A release is a client's trained model; the server assigned it to a hypothesis.",
    (True, True): "A release is one client's part in the noisy sums of its site. The counts of clients for each "
    "hypothesis are noisy too.",
    (True, False): "A release is one client's part in the sums of its site.",
}
_TOGETHER = "A release is one client's part in the sum over all sites. Counts of clients have the sum's noise too."


@dataclass(frozen=True)
class Picture:
    """A figure of the page: heading, SVG, and a description in words."""

    title: str
    svg: Markup
    caption: str


def learning(view: View) -> Iterator[Picture]:
    """Draw the validation loss over rounds, and the metric."""
    if not view.validated:
        return
    name, best = view.summary.loss_name, view.state.best_round or None
    losses = [(entry.loss or 0.0) * view.summary.factor for entry in view.validated]
    what = (
        "each validation client's best hypothesis at the start of a round"
        if view.k > 1
        else "the hypothesis at the start of a round, over validation clients"
    )
    label = f"validation {name}{view.summary.in_unit}"
    caption = f"{name[:1].upper()}{name[1:]} of {what}; lower is better."
    if view.noise:
        best = None if view.undecided else best
        caption += f" Each point is a noisy report{view.noise}."
    caption += " The best round is marked." if best else ""
    alt, numbers = _curve_alt(label, view.validated, losses), _numbers(view.validated)
    yield Picture("Validation loss", figures.curve("loss", alt, numbers, losses, label, best), caption)
    if view.metric_differs:
        metric = view.summary.model.metric.name
        title, values = f"validation {metric}", [_or_nan(entry.metric) for entry in view.validated]
        alt = _curve_alt(title, view.validated, values)
        svg = figures.curve("metric", alt, numbers, values, title, view.state.best_round or None)
        caption = f"The {metric} that the same clients reported in the same rounds."
        yield Picture(f"Validation {metric}", svg, caption)


def spread(view: View) -> Picture | None:
    """Return the spread of validation clients over rounds; None without reports."""
    entries = [entry for entry in view.history if entry.loss_spread]
    if not entries:
        return None
    label = f"validation {view.summary.loss_name}{view.summary.in_unit}"
    quantiles = np.array([entry.loss_spread for entry in entries]) * view.summary.factor
    last = ", ".join(number(value) for value in quantiles[-1])
    alt = f"Bands of the {label} over clients; 10th, 25th, 50th, 75th and 90th percentile at last {last}."
    caption = (
        "Validation clients, each with its best hypothesis: the median, the middle half, and all except the best and "
        "the worst tenth."
    )
    return Picture("From client to client", figures.bands("spread", alt, _numbers(entries), quantiles, label), caption)


def hypotheses(view: View) -> Iterator[Picture]:
    """Draw releases and distances of the hypotheses over rounds."""
    if view.trained:
        totals = view.groups.sum(axis=0)
        went = ", ".join(f"hypothesis {j} {totals[j]:,}" for j in view.shown)
        alt = f"Releases a round for each hypothesis. In total: {went}."
        what = _TOGETHER if view.together else _RELEASED[view.by_site, view.sanitised]
        caption = f"{what} An empty strip is a hypothesis that no client trains any more."
        svg = figures.releases("releases", alt, _numbers(view.trained), view.groups, view.shown)
        yield Picture("Releases of each hypothesis", svg, caption)
    if view.k > 1 and view.steady:
        nearest = np.array([entry.nearest for entry in view.history])
        known = nearest[-len(view.steady) :]
        ends = ", ".join(f"hypothesis {j} {number(known[0, j])} and {number(known[-1, j])}" for j in view.shown)
        alt = f"Distance from each hypothesis to the nearest other one, at first and at last: {ends}."
        caption = (
            "The distance from each hypothesis to the nearest other one at the start of a round. Near zero, both are "
            "the same model."
        )
        svg = figures.distances("distances", alt, _numbers(view.history), nearest, view.shown)
        yield Picture("Distances between hypotheses", svg, caption)


def spending(view: View) -> Picture | None:
    """Return the histogram of training clients by number of participations."""
    clients = len(view.participations)
    if not clients:
        return None
    marks = [
        (f"{who} {number(often)}", float(often)) for who, often in zip(("median", "maximum"), view.often, strict=True)
    ]
    caption = f"{count_of(clients, 'training client')}, by number of participations"
    none = clients - view.took_part
    caption += f"; {none:,} never took part." if none else "."
    alt = f"Histogram over {clients:,} training clients: {', '.join(words for words, _ in marks)}."
    svg = figures.spending("spending", alt, view.participations, marks)
    return Picture("Participations, by client", svg, caption)


def _numbers(entries: Sequence[Round]) -> list[int]:
    return [entry.number for entry in entries]


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


def _curve_alt(label: str, entries: Sequence[Round], values: Sequence[float]) -> str:
    ends = f"{number(values[0])} in round {entries[0].number}, {number(values[-1])} in round {entries[-1].number}"
    return f"Line of the {label} over rounds: {ends}, minimum {number(min(values))}, maximum {number(max(values))}."
