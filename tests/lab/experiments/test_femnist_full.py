"""Table 2 at full length: its grid, its early stop, and runs that are stopped."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import umbel.simulation.sweep
from tests.helpers.datasets import manifest
from tests.lab.experiments.conftest import read_csv
from umbel.data import offsets_of, write_dataset
from umbel.simulation.sweep import Result
from umbel_lab.experiments import femnist_full
from umbel_lab.experiments.__main__ import app

pytestmark = pytest.mark.rest

SPECS = femnist_full.specs(Path(), range(2000, 2003), False, "")


def entry(number: int, loss: float | None, metric: float = 0.0) -> dict[str, Any]:
    return {"number": number, "loss": loss, "metric": metric if loss is not None else None}


def test_the_grid_is_the_papers_and_other_arms_have_larger_rounds_or_steps_or_other_writers(tmp_path: Path) -> None:
    specs = SPECS
    found = [(c["loss"], c["noise-multiplier"], c["seed"]) for c in (s.config for s in specs[:54])]
    nus = 0, 0.001, 0.01, 0.1, 1, 3, 5, 10, 15
    assert set(found) == {*product(("cross-entropy", "rmse"), nus, range(2000, 2003))}
    assert found[:3] == [("cross-entropy", nu, 2000) for nu in (3, 0, 5)], "those first that tell most"
    assert {s.config["clients-per-round"] for s in specs[:54]} == {10}
    assert [(s.config["noise-multiplier"], s.config["clients-per-round"]) for s in specs[58:]] == [
        (10, 47), (10, 47), (15, 47), (15, 47),
    ]  # fmt: skip
    for other, reason in zip(specs[54:58], femnist_full._DATA["reasons"], strict=True):
        change = reason["change"]
        (same,) = (s.config for s in specs[:54] if s.config | change == other.config)
        larger, others = {"step-size": 2 * same["step-size"]}, ({"dataset": "femnist-1"}, {"dataset": "femnist-2"})
        assert change in (larger, *others)
    for spec in specs:
        assert (spec.config["rounds"], spec.config["patience"], spec.config["local-epochs"]) == (500, 0, 1)
    assert len({spec.name for spec in specs}) == len(specs) == 62


def test_the_table_has_the_figure_of_a_whole_run_and_that_of_one_which_stops_without_a_lower_loss(
    tmp_path: Path,
) -> None:
    # Validated every second round; the lowest loss so far is that after round 2, and the fifth after it is of round 12.
    losses = [2.0, 1.0, 1.5, 1.0, 1.2, 1.1, 3.0, 0.5]
    history = [entry(2 * i, loss, metric=i / 10) for i, loss in enumerate(losses)]
    history[1:1] = [entry(1, None)]
    assert femnist_full.with_patience(history) == (0.1, 12)
    assert femnist_full.with_patience(history[:6]) == (0.1, 8), "not yet"
    one = {"mean": 0.7, "worst_decile": 0.5, "rand_index": 1.0}
    results = []
    for spec in (SPECS[0], SPECS[55], SPECS[-1]):  # the paper's, one of a larger step, one of many clients
        path = tmp_path / "runs" / spec.name
        path.mkdir(parents=True)
        lines = [json.dumps(entry(5 * i, loss, 0.1 * i)) for i, loss in enumerate([3.0, 2.0, *[2.5] * 5, 1.0])]
        (path / "history.jsonl").write_text("\n".join(lines))
        results.append(Result(spec, {"best": one, "last": one, "best_round": 35}, path))
    femnist_full.page(results[:1]).write(tmp_path)
    (row,) = read_csv(tmp_path)
    assert (row["accuracy"], row["patience"], row["stopped"]) == ("0.7", "0.1", "30")
    assert float(row["difference"]) == pytest.approx(0.7 - 0.835)
    femnist_full.page(results[1:]).write(tmp_path)
    _, clients, reasons = re.split("## (?:Many clients|Reasons)", (tmp_path / "table.md").read_text())
    assert "| rmse | 15 | 47 | 0.05 | 1 | 0.700 |" in clients
    assert "| femnist | rmse | 10 | 10 | 0.2 | 1 | 0.700 |" in reasons


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_runs_are_packed_and_put_back(umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = manifest(6, 2, name="femnist", model="cnn", feature_scale=1 / 255, groups=[0, 1] * 4)
    images = np.random.default_rng(0).integers(0, 256, (32, 28, 28), np.uint8)
    write_dataset(umbel_home / "data" / "femnist", own, images, np.arange(32) % 62, offsets_of([4] * 8))
    done = CliRunner().invoke(app, ["femnist-full", "--quick"])
    assert done.exit_code == 0, done.output
    assert not list((umbel_home / "experiments" / "unfinished").iterdir())
    table = (umbel_home / "experiments" / "femnist-full-quick" / "table.md").read_bytes()
    # As on another machine: what was done is put back, and nothing is done again.
    (umbel_home / "experiments" / "femnist-full-quick").rename(umbel_home / "experiments" / "femnist-full")
    packed = tmp_path / "runs.jsonl"
    assert CliRunner().invoke(app, ["pack", "femnist-full", str(packed)]).exit_code == 0
    (umbel_home / "experiments" / "femnist-full").rename(tmp_path / "away")
    assert CliRunner().invoke(app, ["unpack", "femnist-full", str(packed)]).stdout == "1 runs\n"
    assert CliRunner().invoke(app, ["unpack", "femnist-full", str(packed)]).stdout == "0 runs\n"
    monkeypatch.setattr(umbel.simulation.sweep, "_each", None)
    place = ["--out", str(umbel_home / "experiments" / "femnist-full")]
    for command in (["femnist-full", "--quick"], ["femnist-full", "--quick", "--tables"]):
        again = CliRunner().invoke(app, [*command, *place])
        assert again.exit_code == 0, again.output
        assert (umbel_home / "experiments" / "femnist-full" / "table.md").read_bytes() == table
