"""Figures of a report: what is counted, and what is drawn."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from functools import cache

import matplotlib
import numpy as np
import pytest

from umbel.server.report import figures
from umbel.server.report.figures import number, tally

pytestmark = pytest.mark.rest

SHOWN = [0, 1]


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in tree(svg).iter("text")]


def tree(svg: str) -> ET.Element:
    return ET.fromstring(svg.replace("xlink:href", "href"))


# --- numbers


@pytest.mark.parametrize(("maximum", "number"), [(0, 1), (39, 40), (40, 21), (79, 40), (80, 27), (99, 34), (1234, 40)])
def test_clients_are_counted_by_how_often_they_took_part_in_few_bars(maximum: int, number: int) -> None:
    step, counts = tally(np.arange(maximum + 1))
    assert len(counts) == number
    assert counts.tolist() == [min(step, maximum + 1 - step * bar) for bar in range(number)]
    assert tally(np.array([0, 2, 0, 3, 2, 2]))[1].tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.57664, "0.5766"), (2.8, "2.8"), (308.0, "308"), (402_196.67, "402,197"), (1e12, "1e+12"), (0.0, "0"),
        (-2.5, "\N{MINUS SIGN}2.5"), (float("inf"), "infinite"), (float("nan"), "nan"), (1e-5, "1e\N{MINUS SIGN}05"),
    ],
)  # fmt: skip
def test_numbers_are_for_people(value: float, text: str) -> None:
    assert number(value) == text


# --- drawings

FIGURES = {
    "curve": lambda name: figures.curve(name, [1, 2, 3], [3.0, 1.0, 2.0], "loss", 2),
    "bands": lambda name: figures.bands(name, [1, 2], np.array([[1.0, 2, 3, 4, 5], [1, 1, 1, 1, 9]]), "loss"),
    "releases": lambda name: figures.releases(name, [1, 2], np.array([[1, 2], [3, 0]]), SHOWN),
    "distances": lambda name: figures.distances(name, [1, 2], np.array([[1.0, 1.0], [3.0, 3.0]]), SHOWN),
    "spending": lambda name: figures.spending(name, np.array([1, 1, 2]), (1.0, 2)),
}  # fmt: skip


@cache
def drawn(kind: str) -> str:
    """Return a figure of a kind; to draw it takes most of the time."""
    return str(FIGURES[kind]("one"))


@pytest.mark.parametrize("kind", FIGURES)
def test_a_figure_is_named_in_the_colours_of_the_page_and_the_same_again_whatever_the_machines_style(kind: str) -> None:
    svg = drawn(kind)
    root = tree(svg)
    assert root.get("role") == "img"
    assert len(root.get("aria-label", "")) > 20
    assert not re.search(r"#[0-9a-f]{6}", svg), "a colour that dark mode would not change"
    assert "var(--series-1)" in svg
    assert "font-family" not in svg
    assert "http" not in svg
    ids = set(re.findall(r' id="([^"]+)"', svg))
    assert ids
    assert all(one.startswith("one-") for one in ids), "with the name of the figure"
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg)) == ids
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "svg.fonttype": "path", "lines.color": "r"}):
        assert FIGURES[kind]("one") == svg
        assert matplotlib.rcParams["font.size"] == 30, "and the machine's style is left as it was"


def test_what_is_drawn_has_its_numbers() -> None:
    assert "round 2: 1" in texts(drawn("curve"))
    labels = texts(figures.curve("x", [1, 2, 3], [0.02, 1.0, 300.0], "loss", 9))
    assert {"0.1", "1", "10", "100"} <= set(labels)
    assert not any("$" in text or "round 9" in text for text in labels)
    labels = texts(figures.releases("x", range(1, 21), np.ones((20, 12), np.int64), list(range(8))))
    assert [f"hypothesis {j}" for j in range(8)] == [text for text in labels if text.startswith("hypothesis")]
    assert {"4 others", "full height: 4 releases a round"} <= set(labels)
    assert {"0", "1", "2"} <= set(texts(figures.distances("x", [1, 2], np.ones((2, 3)), [0, 1, 2])))


def test_thousands_of_rounds_and_a_thousand_hypotheses_stay_small() -> None:
    rng = np.random.default_rng(0)
    rounds, values = range(1, 5001), [2.0] * 5000
    values[76] = 0.125
    curve = figures.curve("x", rounds, values, "loss", 77)
    assert "round 77: 0.125" in texts(curve), "a mark survives when rounds are drawn as means"
    assert len(figures.curve("x", rounds, rng.random(5000).tolist(), "loss", 77)) < 40_000
    assert len(figures.releases("x", rounds, rng.integers(0, 9, (5000, 1000)), list(range(8)))) < 250_000
    assert len(figures.distances("x", rounds, rng.random((5000, 1000)), list(range(8)))) < 250_000


@pytest.mark.parametrize("values", [[], [1.0], [float("inf")], [float("inf"), 2.0], [0.0, 0.0], [1e-9, 1e9], [-1, 1]])
def test_a_curve_of_any_values_can_be_drawn(values: list[float]) -> None:
    tree(figures.curve("x", range(1, len(values) + 1), values, "loss", 1))
