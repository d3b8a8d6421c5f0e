"""Numbers as text, checked by hand; figures are saved twice, and the same figure is the same bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from umbel_lab.output import COLOURS, MARKERS, average, cell, difference, figure, plus_minus, rate


def test_numbers_as_text() -> None:
    assert average([1, 2, 3]) == (2.0, 1.0)
    assert average([5]) == (5.0, 0.0)
    assert all(math.isnan(value) for value in average([]))
    assert [plus_minus(values, 1) for values in ([1000, 1002], [5], [])] == ["1,001.0 ± 1.4", "5.0", "none"]
    assert [difference(*pair) for pair in ((110, 100), (75, 100), (1, 1))] == ["+10 %", "-25 %", "+0 %"]
    # (x + z^2/2 +- z sqrt(x (n - x) / n + z^2 / 4)) / (n + z^2) for x = 96, n = 100, z = 1.96: .9016 and .9843.
    assert rate(96, 100) == "96 of 100 (90 to 98 %)"
    assert [rate(*counts) for counts in ((0, 10), (10, 10), (0, 0))] == [
        "0 of 10 (0 to 28 %)", "10 of 10 (72 to 100 %)", "no runs",
    ]  # fmt: skip
    values: list[Any] = [None, 3, 0.02, 21333.3, "a"]
    assert [cell(value) for value in values] == ["", "3", "0.02", "21,333", "a"]


def test_the_same_figure_is_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        with figure(folder, "line", columns=2) as axes:
            assert axes.shape == (1, 2)
            axes[0, 0].plot([1, 2], [3, 4], color=COLOURS[0], marker=MARKERS[0], label="one")
            axes[0, 0].legend()
        files.append({file.name: file.read_bytes() for file in folder.iterdir()})
    first, second = files
    assert set(first) == {"line.svg", "line.png"}
    assert first == second
    assert first["line.png"].startswith(b"\x89PNG")
    assert b"<svg" in first["line.svg"]
