"""The pictures of a report, each with what it shows in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from umbel.privacy.accounting.guarantee import gap
from umbel.server.history import Round
from umbel.server.report import figures
from umbel.server.report.alarms import count_of
from umbel.server.report.compare import Runs
from umbel.server.report.figures import number
from umbel.server.report.style import STYLED
from umbel.server.report.view import View

# What a release is, by whether a site makes it and whether there is noise.
_RELEASED = {
    (False, True): "A release is a trained model that a client sent, with noise, and that the server assigned to a "
    "hypothesis.",
    (False, False): "A release is a trained model that a client sent and that was assigned to a hypothesis.",
    (True, True): "A release is one client's part in the sums that its site sent, with noise; how many clients trained "
    "each hypothesis is known from noisy counts.",
    (True, False): "A release is one client's part in the sums that its site sent.",
}


@dataclass(frozen=True)
class Picture:
    """A figure of the page: heading, SVG, and what it shows in words."""

    title: str
    svg: Markup
    caption: str


def learning(view: View, runs: Sequence[Runs]) -> list[Picture]:
    """Return the validation loss over rounds, of this run and of those beside it, and the metric."""
    pictures = []
    validated = [entry for entry in view.history if entry.loss is not None]
    best = view.state.best_round or None
    if validated:
        factor, unit = view.summary.scale
        name = view.summary.loss_name
        losses = [(entry.loss or 0.0) * (factor or 1.0) for entry in validated]
        what = (
            "the hypotheses that each round started from, each validation client using the one that fits it best"
            if view.k > 1
            else "the hypothesis that each round started from, over validation clients"
        )
        label = f"validation {name}" + (f" ({unit})" if unit else "")
        caption = f"{name[:1].upper()}{name[1:]} of {what}; lower is better."
        alt = _curve_alt(label, validated, losses)
        line, others = figures.Line("", _numbers(validated), losses), [one.line() for one in runs[1:]]
        if runs and (others or len(runs[0].views) > 1):
            line, alt = runs[0].line(), f"{alt} Beside it: {', '.join(one.name for one in runs)}."
            if any(len(one.views) > 1 for one in runs):
                best = None
                caption += " Of several seeds the line is the mean, and the band what they lie between."
        caption += " The best round is marked." if best else ""
        pictures.append(Picture("Validation loss", figures.curve("loss", alt, line, label, best, others), caption))
        if view.metric_differs():
            metric = view.summary.model.metric.name
            values = [entry.metric if entry.metric is not None else np.nan for entry in validated]
            alt = _curve_alt(f"validation {metric}", validated, values)
            line = figures.Line("", _numbers(validated), values)
            pictures.append(
                Picture(
                    f"Validation {metric}",
                    figures.curve("metric", alt, line, f"validation {metric}", view.state.best_round or None),
                    f"The {metric} that the same clients reported in the same rounds.",
                )
            )
    return pictures


def spread(view: View) -> Picture | None:
    """Return how validation clients differ over rounds; None where none reported."""
    entries = [entry for entry in view.history if entry.loss_spread]
    if not entries:
        return None
    factor, unit = view.summary.scale
    label = f"validation {view.summary.loss_name}" + (f" ({unit})" if unit else "")
    quantiles = np.array([entry.loss_spread for entry in entries]) * (factor or 1.0)
    last = ", ".join(number(value) for value in quantiles[-1])
    alt = f"Bands of the {label} over clients; 10th, 25th, 50th, 75th and 90th percentile at last {last}."
    caption = (
        "What the validation clients reported, each of the hypothesis that fits it best: the median client, the half "
        "around it, and all but the best and the worst tenth."
    )
    svg = figures.bands("spread", alt, _numbers(entries), quantiles, label)
    return Picture("From client to client", svg, caption)


def hypotheses(view: View) -> list[Picture]:
    """Return the figures of what became of the hypotheses over rounds."""
    return [*_releases(view), *_distances(view)]


def _releases(view: View) -> list[Picture]:
    pictures = []
    if view.trained and view.groups.size:
        totals = view.groups.sum(axis=0)
        alt = "Releases a round for each hypothesis. In total: " + ", ".join(
            f"hypothesis {j} {totals[j]:,}" for j in view.shown
        )
        pictures.append(
            Picture(
                "Releases of each hypothesis",
                figures.releases("releases", alt + ".", _numbers(view.trained), view.groups, view.shown),
                f"{_RELEASED[view.by_site, view.sanitised]} A strip that becomes empty is a hypothesis that nobody "
                "trains any more.",
            )
        )
    return pictures


def _distances(view: View) -> list[Picture]:
    pictures = []
    if view.k > 1 and view.steady:
        nearest = np.array([entry.nearest for entry in view.history])
        known = nearest[-len(view.steady) :]
        ends = ", ".join(f"hypothesis {j} {number(known[0, j])} and {number(known[-1, j])}" for j in view.shown)
        alt = f"Distance from each hypothesis to the nearest other one, at first and at last: {ends}."
        pictures.append(
            Picture(
                "How far apart the hypotheses are",
                figures.distances("distances", alt, _numbers(view.history), nearest, view.shown),
                "The distance from each hypothesis to the nearest other one when a round starts. Near zero, they "
                "are the same model.",
            )
        )
    return pictures


def spending(view: View) -> Picture | None:
    """Return the histogram of how often training clients took part."""
    if not len(view.participations):
        return None
    bars = figures.tally(view.participations)
    marks = []
    for who, often, epsilon in zip(("median", "maximum"), view.often, view.epsilons(), strict=True):
        told = "" if gap(view.summary.release) else f", epsilon {epsilon}"
        marks.append((f"{who} {number(often)}{told}", float(often)))
    none = int((view.participations == 0).sum())
    caption = f"Number of training clients by how often they took part, of {len(view.participations):,} in all"
    caption += f"; {none:,} never took part." if none else "."
    words = ", ".join(mark for mark, _ in marks)
    alt = f"Histogram over {len(view.participations):,} training clients: {words}."
    return Picture("Participations, by client", figures.spending("spending", alt, bars, marks), caption)


def planes(view: View) -> list[Picture]:
    """Return the first and the best round in the plane, for models of two parameters."""
    first, best = view.snapshots.first, view.snapshots.best
    if first is None or best is None:
        return []
    truth = view.summary.truth(2)
    drawn = [("first", first)] + ([("best", best)] if best.round != first.round else [])
    limits = figures.window([one for _, one in drawn], truth)
    pictures = []
    for which, one in drawn:
        k = len(one.hypotheses)
        shown = view.shown if k == view.k else list(range(min(k, STYLED)))  # a strategy may change their number
        counts = ", ".join(f"{int((one.groups == j).sum())} to hypothesis {j}" for j in shown)
        alt = f"Round {one.round}: {len(one.releases)} releases in the plane of the two parameters, {counts}."
        title = f"Round {one.round}, the first" if which == "first" else f"Round {one.round}"
        if one.round == view.state.best_round:
            title = f"Round {one.round}, " + ("the first and the best" if which == "first" else "the best")
        elif which == "best":
            title += ", the last"
        caption = (
            f"{count_of(len(one.releases), 'release')}, each in the colour and shape of the hypothesis that it was "
            "assigned to. Open markers are the hypotheses that the round started from."
        )
        if len(shown) < k:
            caption += " Everything in grey belongs to the other hypotheses."
        if len(one.releases) > figures.MAX_RELEASES:
            caption += f" About {figures.MAX_RELEASES:,} releases are drawn."
        if one.round + 1 == view.state.best_round:
            caption += " The hypotheses that it produced did best."
        if len(one.releases) and (one.groups < 0).all():
            caption += " These were too few to move the hypotheses."
        pictures.append(Picture(title, figures.plane(which, alt, one, truth, shown, limits), caption))
    return pictures


def _numbers(entries: Sequence[Round]) -> list[int]:
    return [entry.number for entry in entries]


def _curve_alt(label: str, entries: Sequence[Round], values: Sequence[float]) -> str:
    ends = f"{number(values[0])} in round {entries[0].number}, {number(values[-1])} in round {entries[-1].number}"
    return f"Line of the {label} over rounds: {ends}, minimum {number(min(values))}, maximum {number(max(values))}."
