"""Numbers in tables, checked by hand."""

from __future__ import annotations

import csv
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from umbel.simulation.sweep import Result, Spec
from umbel_lab.experiments.scaffold import good, page
from umbel_lab.output import Section

pytestmark = pytest.mark.rest


def test_a_sweep_leaves_its_tables_and_its_configuration_and_tells_bad_runs(tmp_path: Path) -> None:
    def result(name: str, loss: float = 1.0, error: str = "", **config: Any) -> Result:
        measures = {} if error else {"best_loss": loss}
        return Result(Spec(name, {"seed": 0, "strategy": "ifca", **config}), measures, Path(name), error)

    results = [
        result("one", hypotheses=1),
        result("diverged", math.inf, hypotheses=2),
        result("broken", error="Traceback\nValueError: no such thing", hypotheses=3),
    ]
    assert [one.spec.name for one in good(results)] == ["one"]
    section = Section("Part", "Words.", ("k", "loss"), [["1", "0.5"], ["2", "0.25"]])
    rows = [{"k": 1, "loss": 1 / 3, "printed": None}, {"k": 2, "loss": 0.25, "printed": 0.3}]
    page("Title", [section], rows, results).write(tmp_path)
    said = (tmp_path / "table.md").read_text()
    assert said.startswith("# Title\n\n## Part\n\nWords.\n\n| k | loss |\n| --- | --- |\n| 1 | 0.5 |\n| 2 | 0.25 |\n")
    assert "2 of 3 runs failed or diverged" in said
    assert "| broken | failed: ValueError: no such thing |" in said
    assert "| diverged | diverged: the loss became infinite |" in said
    with (tmp_path / "table.csv").open() as file:
        assert list(csv.reader(file)) == [["k", "loss", "printed"], ["1", "0.333333", ""], ["2", "0.25", "0.3"]]
    config = tomllib.loads((tmp_path / "config.toml").read_text())
    assert config["common"] == {"seed": 0, "strategy": "ifca"}
    assert config["runs"]["one"] == {"hypotheses": 1}
    assert {"umbel", "flwr", "torch", "numpy", "python"} <= set(config["versions"])
