"""A recommender beside baselines: splits by seed, and the table made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from umbel.data import open_dataset
from umbel.models.factors import baselines
from umbel.simulation.measured import Spec
from umbel.simulation.sweep import Result
from umbel_lab.experiments import recommender
from umbel_lab.experiments.recommender import ARMS
from umbel_lab.experiments.scaffold import specs

pytestmark = pytest.mark.rest


def result(spec: Spec, last: float, best: float) -> Result:
    measures = {"best_loss": 0.5, "best": {"mean": best}, "last": {"mean": last}}
    return Result(spec, measures, Path("nowhere"))


def test_each_split_has_a_run_of_each_model_on_the_same_users(tmp_path: Path) -> None:
    runs = specs(recommender, tmp_path, [7, 8], True, "preferences")
    assert [run.name for run in runs] == [
        "factors-seed7", "factors-and-biases-seed7", "factors-seed8", "factors-and-biases-seed8"
    ]  # fmt: skip
    assert [run.config["model"] for run in runs[:2]] == list(ARMS.values()) == ["", "biased-factors"]
    assert {run.config["rounds"] for run in runs} == {recommender._QUICK_ROUNDS}
    assert runs[0].config["dataset"] == runs[1].config["dataset"] != runs[2].config["dataset"]
    assert [run.config["seed"] for run in runs] == [7, 7, 8, 8]


def test_the_table_says_how_far_each_is_ahead_of_the_strongest_rule(tmp_path: Path) -> None:
    runs = specs(recommender, tmp_path, [7, 8], True, "preferences")
    rules = {path: baselines(open_dataset(Path(path))) for path in {run.config["dataset"] for run in runs}}

    def ahead(run: Spec, much: float) -> float:
        return rules[run.config["dataset"]]["item and user bias"] + much

    found = [result(run, ahead(run, 0.01 if run.config["model"] else -0.02), ahead(run, 0)) for run in runs]
    recommender.page(found).write(tmp_path)
    page = (tmp_path / "table.md").read_text()
    assert "| all liked |" in page
    biased, plain = (next(row for row in page.splitlines() if row.startswith(f"| {name}, last")) for name in (
        "factors and biases", "factors"
    ))  # fmt: skip
    assert "0.0100 ± 0.0000 | 2 of 2" in biased
    assert "-0.0200 ± 0.0000 | 0 of 2" in plain
