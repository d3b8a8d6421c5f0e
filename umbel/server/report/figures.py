"""The figures of a report, as SVG inside its page.

They are drawn in fixed colours that are then replaced by the page's CSS variables, so that one
drawing serves light, dark and paper. Hypotheses differ in marker and line as well as in colour.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_MAX_POINTS = 600  # along the rounds; more are drawn as means of successive rounds
_MAX_STEPS = 300  # the same where each takes a step
_MAX_BARS = 40
_LABEL = 34  # characters of a line in a legend
STYLED = 8  # hypotheses with a separate colour; the others share one
# In points, which the page treats as pixels. Narrow enough for a phone at full size: text of
# 12 pixels stays above 11 on a page of 390, and grows on a desktop.
WIDTH, HEIGHT = 340, 230
# Placeholders: any distinct colours will do.
INK, MUTED, LINE, PAPER, REST = "#101010", "#202020", "#303030", "#404040", "#505050"
SERIES = [f"#6060{j:02x}" for j in range(1, STYLED + 1)]
VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", PAPER: "paper", REST: "rest"} | {
    colour: f"series-{j}" for j, colour in enumerate(SERIES, 1)
}
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "p"]
DASHES: list[Any] = [
    "-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1)), (0, (6, 2, 1, 2, 1, 2)), (0, (1, 4)),
]  # fmt: skip
# The same markers for tables, in a square of 16.
KEYS = [
    '<circle cx="8" cy="8" r="5"/>',
    '<path d="M3.5 3.5h9v9h-9z"/>',
    '<path d="M8 2.5l5.5 10h-11z"/>',
    '<path d="M8 2l6 6-6 6-6-6z"/>',
    '<path d="M8 13.5l5.5-10h-11z"/>',
    '<path d="M6 2.5h4V6h3.5v4H10v3.5H6V10H2.5V6H6z"/>',
    '<path d="M5 2.5l3 3 3-3L13.5 5l-3 3 3 3-2.5 2.5-3-3-3 3L2.5 11l3-3-3-3z"/>',
    '<path d="M8 2l6 4.4-2.3 7.1H4.3L2 6.4z"/>',
]
# Turned off, since a unit may be $, which would start TeX.
STYLE: dict[Any, Any] = {"text.parse_math": False, "svg.fonttype": "none", "text.color": INK, "axes.labelcolor": MUTED}
STYLE |= dict.fromkeys(("font.size", "axes.labelsize", "legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 12)
STYLE |= dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), LINE)
STYLE |= {"axes.linewidth": 1, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
STYLE |= {"axes.facecolor": "none", "figure.facecolor": "none", "grid.linewidth": 0.7, "lines.linewidth": 1.8}
STYLE |= {"xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED, "xtick.major.size": 4, "ytick.major.size": 0}
STYLE |= {"legend.frameon": False, "legend.handlelength": 2, "legend.borderpad": 0.2, "legend.labelspacing": 0.3}


def key(place: int | None) -> Markup:
    """Draw the marker of the hypothesis in a place, for tables."""
    if place is None:
        return Markup('<svg class="key" viewBox="0 0 16 16" aria-hidden="true"></svg>')
    fill = f"var(--series-{place + 1})"
    return Markup(f'<svg class="key" viewBox="0 0 16 16" aria-hidden="true" style="fill: {fill}">{KEYS[place]}</svg>')


def svg(name: str, alt: str, draw: Callable[[Axes], None], height: int = HEIGHT) -> Markup:
    """Return the drawing of `draw` as SVG, with ids that no other figure of the page has."""
    import matplotlib  # the import takes half a second
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the machine's matplotlibrc changes nothing
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": name})
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="|url\()#([\w.-]+)', body))
    body = re.sub(r"<[^>]*>", lambda tag: _tag(tag[0], name, used), body)
    head = f'<svg role="img" aria-label="{escape(alt)}" viewBox="0 0 {WIDTH} {height}">'
    return Markup(head + re.sub(r">\s+<", "><", body.strip()))


def _tag(tag: str, name: str, used: set[str]) -> str:
    """Return a tag of matplotlib's SVG, adapted to the page."""
    tag = re.sub(r' id="([\w.-]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", tag)
    tag = re.sub(r'((?:href="|url\()#)', rf"\g<1>{name}-", tag)
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", tag)
    tag = re.sub(r"(\d\.\d{2})\d+", r"\1", tag)
    tag = re.sub(r"\s*\n\s*", " ", tag)
    for colour, variable in VARIABLES.items():
        tag = tag.replace(colour, f"var(--{variable})")
    return tag


def tally(participations: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
    """Count clients by number of participations, in at most 40 equal steps from 0; return step and counts."""
    maximum = int(participations.max(initial=0))
    step = -(-(maximum + 1) // _MAX_BARS)
    return step, np.bincount(participations // step, minlength=maximum // step + 1)


def number(value: float) -> str:
    """Return a number as text: four significant digits, and commas in thousands."""
    if not np.isfinite(value):
        return "infinite" if value > 0 else str(value)
    if abs(value) >= 1e9:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("-", "\N{MINUS SIGN}")


def curve(name: str, rounds: Sequence[int], values: Sequence[float], label: str, marked: int | None = None) -> Markup:
    """Draw a value over rounds, with a mark at the round `marked`."""
    alt = ""
    if len(values):
        ends = f"{number(values[0])} in round {rounds[0]}, {number(values[-1])} in round {rounds[-1]}"
        least, most = number(min(values)), number(max(values))
        alt = f"Line of the {label} over rounds: {ends}, minimum {least}, maximum {most}."

    def draw(axes: Axes) -> None:
        keep = np.isfinite(values)
        x, y = np.asarray(rounds)[keep], np.asarray(values, np.float64)[keep]
        at = np.flatnonzero(x == marked)
        drawn, means = _thin(x, y[:, None])
        axes.plot(
            drawn, means[:, 0], color=SERIES[0], markersize=3, marker=MARKERS[0] if len(rounds) <= 60 else "",
            linewidth=1.8 if len(drawn) <= 200 else 1,
        )  # fmt: skip
        _log(axes, np.asarray(values, np.float64))
        if len(at):
            axes.axvline(x[at[0]], color=REST, linewidth=1, linestyle=(0, (3, 3)), zorder=1)
            axes.plot(x[at], y[at], "o", color=SERIES[1], markersize=8, markeredgecolor=PAPER, zorder=4)
            right = x[at[0]] - x[0] > (x[-1] - x[0]) / 2
            axes.annotate(
                f"round {marked}: {number(y[at[0]])}", (x[at[0]], 1), (0, 4), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="right" if right else "left", fontsize=12,
            )  # fmt: skip
        _rounds(axes, fill(label, _LABEL))

    return svg(name, alt, draw)


def bands(name: str, rounds: Sequence[int], quantiles: NDArray[np.float64], label: str) -> Markup:
    """Draw quantiles of clients over rounds: `quantiles` (T, 5) are the 10th, 25th, 50th, 75th and 90th percentile."""
    last = ", ".join(number(value) for value in quantiles[-1])
    alt = f"Bands of the {label} over clients; 10th, 25th, 50th, 75th and 90th percentile at last {last}."

    def draw(axes: Axes) -> None:
        finite = np.isfinite(quantiles).all(axis=1)
        x, y = _thin(np.asarray(rounds)[finite], quantiles[finite], _MAX_STEPS)
        axes.fill_between(x, y[:, 0], y[:, 4], color=SERIES[0], alpha=0.2, linewidth=0, label="8 of 10 clients")
        axes.fill_between(x, y[:, 1], y[:, 3], color=SERIES[0], alpha=0.3, linewidth=0, label="half")
        axes.plot(x, y[:, 2], color=SERIES[0], label="median")
        _log(axes, y)
        _legend(axes, ncols=3, columnspacing=1, handletextpad=0.4)
        _rounds(axes, fill(label, _LABEL))

    return svg(name, alt, draw)


def releases(name: str, rounds: Sequence[int], groups: NDArray[np.int64], shown: Sequence[int]) -> Markup:
    """Draw the releases (T, k) of each hypothesis: one strip for each, and one for all that are not `shown`."""
    rest, totals = np.setdiff1d(np.arange(groups.shape[1]), shown), groups.sum(axis=0)
    went = ", ".join(f"hypothesis {j} {totals[j]:,}" for j in shown)
    alt = f"Releases a round for each hypothesis. In total: {went}."
    columns = np.hstack([groups[:, shown], *([groups[:, rest].sum(axis=1, keepdims=True)] if len(rest) else [])])
    labels = [f"hypothesis {j}" for j in shown] + ([f"{len(rest)} others"] if len(rest) else [])
    colours, bases = [*SERIES[: len(shown)], REST], np.arange(len(labels))[::-1]

    def draw(axes: Axes) -> None:
        x, strips = _thin(np.asarray(rounds), columns.astype(np.float64), _MAX_STEPS)
        top = max(1.0, strips.max(initial=0))
        for base, strip, colour in zip(bases, strips.T, colours, strict=False):
            axes.fill_between(x, base, base + 0.82 * strip / top, step="mid", color=colour, linewidth=0)
            axes.axhline(base, color=LINE, linewidth=1)
        _rounds(axes)
        axes.grid(visible=False)
        axes.set_yticks(bases + 0.4, labels)
        axes.set_ylim(-0.05, len(labels))
        axes.spines["left"].set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.set_title(f"full height: {number(round(top, 1))} releases a round", loc="right", fontsize=12, color=MUTED)

    return svg(name, alt, draw, max(HEIGHT, 70 + 27 * len(labels)))


def distances(name: str, rounds: Sequence[int], nearest: NDArray[np.float64], shown: Sequence[int]) -> Markup:
    """Draw the distance (T, k) from each hypothesis to the nearest other one."""
    ends = ", ".join(f"hypothesis {j} {number(nearest[0, j])} and {number(nearest[-1, j])}" for j in shown)
    alt = f"Distance from each hypothesis to the nearest other one, at first and at last: {ends}."
    rest, pair = np.setdiff1d(np.arange(nearest.shape[1]), shown), nearest.shape[1] == 2

    def draw(axes: Axes) -> None:
        x, lines = _thin(np.asarray(rounds), np.where(np.isfinite(nearest), nearest, np.nan), _MAX_STEPS)
        if pair:
            axes.plot(x, lines[:, 0], color=SERIES[0], label="between the two")
        else:
            for i, j in enumerate(shown):
                where = (i * len(x) // (8 * len(shown)), max(1, len(x) // 8))
                axes.plot(
                    x, lines[:, j], color=SERIES[i], linestyle=DASHES[i], linewidth=1.5, marker=MARKERS[i],
                    markersize=5.5, markeredgecolor=PAPER, markeredgewidth=0.6, markevery=where, label=str(j),
                )  # fmt: skip
            if len(rest):
                low, high = lines[:, rest].min(axis=1), lines[:, rest].max(axis=1)
                label = f"{len(rest)} others"
                axes.fill_between(x, low, high, color=REST, alpha=0.35, linewidth=0, zorder=1, label=label)
            _legend(axes, centre=True, ncols=4, columnspacing=1, handletextpad=0.4)
        axes.set_ylim(bottom=0)
        _rounds(axes, "distance (norm of parameters)" if pair else "to the nearest other (norm)")

    return svg(name, alt, draw)


def spending(name: str, participations: NDArray[np.int64], often: tuple[float, int]) -> Markup:
    """Draw how many clients took part how often, with marks at the median and the maximum."""
    marks = [(f"median {number(often[0])}", often[0]), (f"maximum {number(often[1])}", often[1])]
    words = ", ".join(words for words, _ in marks)
    alt = f"Histogram over {len(participations):,} training clients: {words}."

    def draw(axes: Axes) -> None:
        step, counts = tally(participations)
        axes.bar((np.arange(len(counts)) + 0.5) * step - 0.5, counts, width=0.86 * step, color=SERIES[0])
        axes.set_ylim(0, 1.08 * max(1, counts.max()))
        axes.set_xlim(-0.6 * step, max(len(counts) * step, 4))
        for row, (words, times) in enumerate(marks):
            axes.axvline(times, color=INK, linewidth=1.4, linestyle=DASHES[1 + row], label=words)
        _legend(axes)
        axes.grid(axis="y")
        _ticks(axes.xaxis, 6, integer=True)
        _ticks(axes.yaxis, 5, integer=True)
        _labels(axes, "participations", "clients")

    return svg(name, alt, draw)


def _thin(
    x: NDArray[Any], y: NDArray[np.float64], maximum: int = _MAX_POINTS
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Return means of successive rows of y (T, c) if there are too many to draw."""
    size = -(-len(x) // maximum) or 1
    if size == 1:
        return x, y
    starts = np.arange(0, len(x), size)
    lengths = np.diff([*starts, len(x)])
    return np.add.reduceat(x, starts) / lengths, np.add.reduceat(y, starts, axis=0) / lengths[:, None]


def _rounds(axes: Axes, label: str = "") -> None:
    """Label axes of rounds."""
    axes.grid(axis="y")
    _ticks(axes.xaxis, 6, integer=True, min_n_ticks=1)
    _labels(axes, "round", label)


def _ticks(axis: Axis, most: int, **options: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, **options))


def _labels(axes: Axes, x: str, y: str) -> None:
    """Label axes, and their ticks with numbers for people."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(round(value, 10))))
    axes.yaxis.set_minor_formatter(NullFormatter())  # a log scale's default writes TeX
    axes.set(xlabel=x, ylabel=y)


def _legend(axes: Axes, centre: bool = False, **looks: Any) -> None:
    """Put the legend above the figure."""
    axes.legend(loc="lower center" if centre else "lower left", bbox_to_anchor=(0.5 if centre else 0, 1), **looks)


def _log(axes: Axes, values: NDArray[np.float64]) -> None:
    """Draw positive values of very different sizes on a log scale."""
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() > 0 and finite.max() > 50 * finite.min():
        axes.set_yscale("log")
