"""Numbers in tables, checked by hand."""

from __future__ import annotations

import csv
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from umbel.research.experiments.runs import Spec
from umbel.research.experiments.sweep import Result
from umbel.research.experiments.tables import Section, average, difference, good, plus_minus, rate, write


def result(name: str, loss: float = 1.0, error: str = "", **config: Any) -> Result:
    measures = {} if error else {"best_loss": loss}
    return Result(Spec(name, {"seed": 0, "strategy": "ifca", **config}), measures, Path(name), error)


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


def test_runs_that_failed_or_diverged_are_told_and_left_out(tmp_path: Path) -> None:
    results = [
        result("fine"),
        result("diverged", math.inf),
        result("broken", error="Traceback\nValueError: no such thing"),
    ]
    assert [one.spec.name for one in good(results)] == ["fine"]
    write(tmp_path, "Title", [], [{"a": 1}], results)
    page = (tmp_path / "table.md").read_text()
    assert "2 of 3 runs failed or diverged" in page
    assert "| broken | failed: ValueError: no such thing |" in page
    assert "| diverged | diverged: the loss became infinite |" in page
    assert "fine" not in page


def test_a_sweep_leaves_its_tables_and_its_configuration(tmp_path: Path) -> None:
    section = Section("Part", "Words.", ("k", "loss"), [["1", "0.5"], ["2", "0.25"]])
    rows = [{"k": 1, "loss": 1 / 3, "printed": None}, {"k": 2, "loss": 0.25, "printed": 0.3}]
    write(tmp_path, "Title", [section], rows, [result("one", hypotheses=1), result("two", hypotheses=2)])
    page = (tmp_path / "table.md").read_text()
    assert page.startswith("# Title\n\n## Part\n\nWords.\n\n| k | loss |\n| --- | --- |\n| 1 | 0.5 |\n| 2 | 0.25 |\n")
    assert "None of 2 runs failed or diverged." in page
    with (tmp_path / "table.csv").open() as file:
        assert list(csv.reader(file)) == [["k", "loss", "printed"], ["1", "0.333333", ""], ["2", "0.25", "0.3"]]
    config = tomllib.loads((tmp_path / "config.toml").read_text())
    assert config["common"] == {"seed": 0, "strategy": "ifca"}
    assert config["runs"] == {"one": {"hypotheses": 1}, "two": {"hypotheses": 2}}
    assert {"umbel", "flwr", "torch", "numpy", "python"} <= set(config["versions"])
