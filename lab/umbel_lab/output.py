"""The output of experiments and attacks: a page of tables, a CSV file, figures. Equal rows give equal bytes."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tomli_w
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umbel.protocol.home import make_folder, write_atomically

Value = str | int | float | None
Row = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Row], str]]


@dataclass(frozen=True)
class Section:
    """A part of a page: an optional heading, one or more paragraphs, and a table if there are columns."""

    title: str
    text: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()

    @classmethod
    def of(cls, title: str, text: str, columns: Columns, rows: Iterable[Row]) -> Section:
        """Return a section of rows.

        A column is a function, a key, or a key with a format: "rmse:.3f", "rmse:±3" for `spread`, "found:rate" for
        `rate` of the row's runs. None is empty.
        """
        return cls(title, text, tuple(columns), [[_shown(row, how) for how in columns.values()] for row in rows])


def _shown(row: Row, how: str | Callable[[Row], str]) -> str:
    if not isinstance(how, str):
        return how(row)
    key, _, layout = how.partition(":")
    if layout.startswith("±"):
        return "" if row.get(key) is None else spread(row, key, int(layout[1:]))
    if layout == "rate":
        return "" if row[key] is None else rate(row[key], row["runs"])
    return format(row[key], layout) if layout and row[key] is not None else cell(row[key])


@dataclass(frozen=True)
class Page:
    """The output of one experiment or attack: a title and sections for people, and rows of the CSV `file`.

    The CSV file has the keys of all rows. The `document` becomes ``config.toml``, unless it is None; `draw` draws
    figures into the folder; `aside` is printed below the tables, and not written.
    """

    title: str
    sections: Sequence[Section]
    rows: Sequence[Row]
    document: Mapping[str, Any] | None = None
    file: str = "table.csv"
    draw: Callable[[Path], None] | None = None
    aside: str = ""

    def write(self, folder: Path) -> None:
        """Write ``table.md``, the CSV file, ``config.toml`` if there is a document, and the figures."""
        make_folder(folder)
        parts = [f"# {self.title}\n"]
        for section in self.sections:
            lines = [section.columns, ["---"] * len(section.columns), *section.rows] if section.columns else []
            table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
            heading = f"## {section.title}" if section.title else ""
            above = "\n\n".join(part for part in (heading, section.text) if part)
            parts += [f"{above}\n"] * bool(above) + [table] * bool(table)
        write_atomically(folder / "table.md", "\n".join(parts).encode())
        buffer = io.StringIO()
        names = list(dict.fromkeys(key for row in self.rows for key in row))
        writer = csv.DictWriter(buffer, names, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
        write_atomically(folder / self.file, buffer.getvalue().encode())
        if self.document is not None:
            write_atomically(folder / "config.toml", tomli_w.dumps(self.document).encode())
        if self.draw:
            self.draw(folder)

    def show(self) -> None:
        """Print the page."""
        console = Console()
        for section in (*self.sections, Section("", self.aside)):
            if section.columns:
                table = Table(title=section.title or self.title)
                for column in section.columns:
                    table.add_column(column, overflow="fold")  # a long word is broken, not cut
                for row in section.rows:
                    table.add_row(*map(escape, row))  # brackets are not markup here
                console.print(table)
            if section.text:
                console.print(section.text, soft_wrap=True, markup=False)


def cell(value: Any) -> str:
    """Return a table's value as text."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def average(values: Iterable[float]) -> tuple[float, float]:
    """Return mean and empirical standard deviation (divisor n - 1, 0 for a single value)."""
    array = np.asarray(list(values), float)
    if not len(array):
        return math.nan, math.nan
    return float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else 0.0


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN for no values."""
    return average(values)[0]


def plus_minus(values: Iterable[float], digits: int) -> str:
    """Return mean and standard deviation as text; a single value has no deviation."""
    found = list(values)
    return spread({"runs": len(found), **numbers("value", found)}, "value", digits)


def spread(row: Row, name: str, digits: int) -> str:
    """Return the text of `plus_minus` for a row's NAME and NAME_sd, over its ``runs`` values."""
    if math.isnan(row[name]):
        return "none"
    return f"{row[name]:,.{digits}f}" + (f" ± {row[f'{name}_sd']:,.{digits}f}" if row["runs"] > 1 else "")


def numbers(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return the entries NAME and NAME_sd of a row."""
    return dict(zip((name, f"{name}_sd"), average(values), strict=True))


def difference(measured: float, printed: float) -> str:
    """Return the difference in per cent of a measured number from a printed one."""
    return f"{100 * (measured / printed - 1):+.0f} %"


def interval(successes: int, runs: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, from at least one run (Wilson, 1927)."""
    z = 1.959964
    centre = (successes + z**2 / 2) / (runs + z**2)
    half = z * math.sqrt(successes * (runs - successes) / runs + z**2 / 4) / (runs + z**2)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def rate(successes: int, runs: int) -> str:
    """Return a count of runs with its 95 % interval, as text."""
    if not runs:
        return "no runs"
    low, high = interval(successes, runs)
    return f"{successes} of {runs} ({100 * low:.0f} to {100 * high:.0f} %)"


def verdict(low: float, high: float, wanted: float) -> str:
    """Return whether a number in this interval is at least the wanted one: yes, no, or open if both are possible."""
    return "yes" if low >= wanted else "no" if high < wanted else "open"


# Okabe and Ito's colours, which the colour-blind can distinguish; markers separate series in grey as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#DDDDDD", "legend.frameon": False, "svg.fonttype": "none",
}  # fmt: skip


@contextmanager
def figure(
    folder: Path, name: str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6, 4)
) -> Iterator[Any]:
    """Yield the axes (rows, columns), or the only one, of a figure that is saved as ``NAME.svg`` and ``.png``."""
    # Without a salt, the ids in an SVG are random.
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        drawing = Figure(figsize=size, layout="constrained")
        axes = drawing.subplots(rows, columns, squeeze=False)
        yield axes if axes.size > 1 else axes[0, 0]
        for ending, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            drawing.savefig(buffer, format=ending, dpi=150, metadata=metadata)
            write_atomically(folder / f"{name}.{ending}", buffer.getvalue())


def series(i: int) -> dict[str, Any]:
    """Return the style of a figure's i-th line."""
    return {"color": COLOURS[i], "marker": MARKERS[i], "linewidth": 1}
