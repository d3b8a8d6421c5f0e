"""Numbers as text, checked by hand; figures are saved twice, and the same figure is the same bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from umbel_lab.output import COLOURS, MARKERS, average, cell, difference, figure, plus_minus, rate


def test_mean_and_standard_deviation() -> None:
    assert average([1, 2, 3]) == (2.0, 1.0)
    assert average([5]) == (5.0, 0.0)
    assert all(math.isnan(value) for value in average([]))
    assert plus_minus([1000, 1002], 1) == "1,001.0 ± 1.4"
    assert plus_minus([5], 1) == "5.0"
    assert plus_minus([], 1) == "none"


@pytest.mark.parametrize(("measured", "printed", "text"), [(110, 100, "+10 %"), (75, 100, "-25 %"), (1, 1, "+0 %")])
def test_a_difference_is_in_per_cent_of_the_printed_number(measured: float, printed: float, text: str) -> None:
    assert difference(measured, printed) == text


def test_a_rate_has_its_wilson_interval() -> None:
    # (x + z^2/2 +- z sqrt(x (n - x) / n + z^2 / 4)) / (n + z^2) for x = 96, n = 100, z = 1.96: .9016 and .9843.
    assert rate(96, 100) == "96 of 100 (90 to 98 %)"
    assert rate(0, 10) == "0 of 10 (0 to 28 %)"
    assert rate(10, 10) == "10 of 10 (72 to 100 %)"
    assert rate(0, 0) == "no runs"


@pytest.mark.parametrize(("value", "text"), [(None, ""), (3, "3"), (0.02, "0.02"), (21333.3, "21,333"), ("a", "a")])
def test_cells(value: Any, text: str) -> None:
    assert cell(value) == text


def draw(folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    with figure(folder, "line", columns=2) as axes:
        assert axes.shape == (1, 2)
        axes[0, 0].plot([1, 2], [3, 4], color=COLOURS[0], marker=MARKERS[0], label="one")
        axes[0, 0].legend()
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_same_figure_is_the_same_bytes(tmp_path: Path) -> None:
    first, second = draw(tmp_path / "a"), draw(tmp_path / "b")
    assert set(first) == {"line.svg", "line.png"}
    assert first == second
    assert first["line.png"].startswith(b"\x89PNG")
    assert b"<svg" in first["line.svg"]
