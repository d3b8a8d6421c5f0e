"""Figures are saved twice, and the same figure is the same bytes."""

from __future__ import annotations

from pathlib import Path

from umbel.research.experiments.figures import COLOURS, MARKERS, figure


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
