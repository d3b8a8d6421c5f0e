"""The style of a report's figures, and their conversion to SVG in the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


@contextmanager
def styled_as(salt: str) -> Iterator[None]:
    """Draw in this style, and ignore the machine's matplotlibrc."""
    import matplotlib  # the import takes half a second

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": salt})
        yield


def svg(name: str, alt: str, draw: Callable[[Axes], None], height: int = HEIGHT) -> Markup:
    """Return the drawing of `draw` as SVG, with ids that no other figure of the page has."""
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with styled_as(name):
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
