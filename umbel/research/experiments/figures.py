"""How the figures of the experiments look and how they are saved."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from umbel.protocol.home import write_atomically

# Okabe and Ito's colours, which the colour-blind can tell apart; markers tell series apart in grey as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "svg.fonttype": "none",
}


@contextmanager
def figure(
    folder: Path, name: str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6, 4)
) -> Iterator[Any]:
    """Give the axes, shape (rows, columns), of a figure that is saved as ``NAME.svg`` and ``NAME.png`` in the end.

    The same figure gives the same bytes.
    """
    # Ids in an SVG are random unless they are salted.
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        drawing = Figure(figsize=size, layout="constrained")
        yield drawing.subplots(rows, columns, squeeze=False)
        for ending, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            buffer = io.BytesIO()
            drawing.savefig(buffer, format=ending, dpi=150, metadata=metadata)
            write_atomically(folder / f"{name}.{ending}", buffer.getvalue())
