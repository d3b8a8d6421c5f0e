"""The picture in README: what a hospital gets alone, without privacy and with a guarantee, drawn from a kept table.

The SVG has both a light and a dark palette, and takes the reader's. Equal tables give equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MEAN, WORST = "made its own", "worst decile"
"""Columns of the experiment's table."""

_WIDTH, _LEFT, _BAR, _GAP, _TOP = 720, 220, 30, 14, 60
_STYLE = """
    .card { fill: #ffffff; } .text { fill: #1f2328; } .soft { fill: #59636e; } .line { stroke: #d1d9e0; }
    .alone { fill: #9a6700; } .open { fill: #59636e; } .kept { fill: #0969da; } .pale { opacity: 0.3; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #0d1117; } .text { fill: #f0f6fc; } .soft { fill: #9198a1; } .line { stroke: #3d444d; }
      .alone { fill: #d29922; } .open { fill: #9198a1; } .kept { fill: #4493f8; }
    }
    text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
    .small { font-size: 13px; } .title { font-size: 16px; font-weight: 600; }"""


@dataclass(frozen=True)
class Bar:
    """A way to serve hospitals.

    Attributes
    ----------
    label, kind : str
        In the picture, and its class there.
    mean, worst : float
        RMSE in dollars, over hospitals and over the tenth that fares worst.
    """

    label: str
    kind: str
    mean: float
    worst: float


def hospitals(rows: Sequence[dict[str, str]]) -> list[Bar]:
    """Return the three ways of the picture, from the rows of ``frontier hospital-services`` by column."""
    found = {(row["who protects what"], row["setting"]): row for row in rows}
    ways = {
        "a hospital alone": ("alone", ("by itself", "service as a number")),  # the better of its two ways
        "together, without privacy": ("open", ("no noise", "the same schedule")),
        "together, pure ε 4": ("kept", ("k = 1", "epsilon 4")),
    }
    return [
        Bar(label, kind, _number(found[key][MEAN]), _number(found[key][WORST])) for label, (kind, key) in ways.items()
    ]


def _number(cell: str) -> float:
    """Return the mean of a cell such as ``1,199 ± 21``."""
    return float(cell.partition("±")[0].replace(",", ""))


def draw(bars: Sequence[Bar], title: str, below: str) -> str:
    """Return the bars as SVG, with a description for readers who do not see it."""
    height = _TOP + len(bars) * (_BAR + _GAP) + 34
    scale = (_WIDTH - _LEFT - 70) / max(bar.worst for bar in bars)
    said = "; ".join(f"{bar.label} {bar.mean:,.0f}, worst tenth {bar.worst:,.0f}" for bar in bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-labelledby="title desc">',
        f'  <title id="title">{escape(title)}</title>',
        f'  <desc id="desc">{escape(said)}. {escape(below)}</desc>',
        f"  <style>{_STYLE}\n  </style>",
        f'  <rect class="card" width="{_WIDTH}" height="{height}" rx="8"/>',
        f'  <text class="text title" x="20" y="32">{escape(title)}</text>',
        f'  <line class="line" x1="{_LEFT}" x2="{_LEFT}" y1="{_TOP - 12}" y2="{height - 42}"/>',
    ]
    for place, bar in enumerate(bars):
        top = _TOP + place * (_BAR + _GAP)
        mean, worst, middle = bar.mean * scale, bar.worst * scale, top + _BAR / 2
        lines += [
            f'  <text class="text" x="{_LEFT - 12}" y="{middle + 5:g}" text-anchor="end">{escape(bar.label)}</text>',
            f'  <rect class="{bar.kind} pale" x="{_LEFT}" y="{top}" width="{worst:.1f}" height="{_BAR}" rx="2"/>',
            f'  <rect class="{bar.kind}" x="{_LEFT}" y="{top}" width="{mean:.1f}" height="{_BAR}" rx="2"/>',
            f'  <text class="text" x="{_LEFT + mean + 8:.1f}" y="{middle + 5:g}">{bar.mean:,.0f}</text>',
            f'  <text class="soft small" x="{_LEFT + worst + 8:.1f}" y="{middle + 5:g}">{bar.worst:,.0f}</text>',
        ]
    lines += [f'  <text class="soft small" x="20" y="{height - 14}">{escape(below)}</text>', "</svg>", ""]
    return "\n".join(lines)
