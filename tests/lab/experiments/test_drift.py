"""Clients that change: what happens to them, on which nodes, and what the tables make of it."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lab.experiments.conftest import read_csv
from umbel.data import Manifest, write_leaf
from umbel.simulation.in_process import run_config
from umbel.simulation.sweep import Result
from umbel_lab.experiments import drift
from umbel_lab.experiments.drift import BEFORE, FRESH, PHASES, ROUNDS, SPARE, Clients, Phase, back_after

pytestmark = pytest.mark.rest


@cache
def world() -> list[tuple[Manifest, Clients]]:
    """The data of seed 7, which no test changes."""
    return list(drift._world(7))


# --- the data


def test_whoever_comes_is_numbered_behind_all_others_and_whoever_stays_stays() -> None:
    steps = {name: (manifest, rows) for name, (manifest, rows) in zip(drift._files(), world(), strict=True)}
    assert {name: manifest.split for name, (manifest, _) in steps.items() if name[0] in "4 5 6"} == {
        "4-0.json": {"train": 150, "validation": 150},
        "5-0.json": {"train": 100, "validation": 100},
        "6-0.json": {"train": 150, "validation": 150},
    }
    groups = {name: np.array(manifest.groups) for name, (manifest, _) in steps.items()}
    assert (groups["2-4.json"] == groups["0-0.json"]).all()
    sides = (groups["3-0.json"] != groups["0-0.json"]).mean()
    assert 0.2 < sides < 0.4
    for name in ("4-0.json", "6-0.json"):
        trains, validates = np.split(groups[name], 2)
        assert (trains[:100] == groups["3-0.json"][:100]).all()
        assert set(trains[100:]) | set(validates[100:]) == {2}


def test_one_optimum_jumps_and_the_other_drifts() -> None:
    truth = [np.array(manifest.truth) for manifest, _ in world()]
    start, jumped, *drifting, _, third, left, back = truth
    assert start.tolist() == [[5, 6], [4, -4.5]]
    assert np.linalg.norm(jumped[0] - start[0]) >= 6
    assert jumped[1].tolist() == start[1].tolist()
    steps = np.diff([jumped[1], *(one[1] for one in drifting)], axis=0)
    np.testing.assert_allclose(steps, np.tile(steps[0], (5, 1)))
    assert np.linalg.norm(steps.sum(axis=0)) >= 6
    assert (len(third), len(left), len(back)) == (3, 2, 3)
    assert (third == back).all()


def test_rows_are_new_in_every_phase_and_the_same_for_a_seed() -> None:
    (_, first), (_, second), *_ = world()
    assert not np.isin(first["3"][0], second["3"][0]).any()
    assert (next(drift._world(7))[1]["3"][1] == first["3"][1]).all()
    assert (next(drift._world(8))[1]["3"][1] != first["3"][1]).any()


# --- a run of phases


@pytest.fixture
def two_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two rounds, two more on the same rows, one with newcomers."""
    monkeypatch.setattr(drift, "PHASES", (Phase("one", (2,)), Phase("two", (2, 1))))
    steps = world()
    for file, step in zip(("0-0.json", "1-0.json", "1-1.json"), (steps[0], steps[0], steps[-1]), strict=True):
        write_leaf(tmp_path / file, *step)
    return run_config("synthetic", dataset=str(tmp_path), model="linear", clients_per_round=60, restarts=2) | {
        "start-from": BEFORE,
        SPARE: 0,
    }


def test_the_nodes_own_ledger_goes_on_from_phase_to_phase_and_there_may_be_a_spare(two_phases: dict[str, Any]) -> None:
    finished = drift.play(two_phases)
    measures = finished.measures
    assert measures["charged"] == finished.participations.tolist()
    assert sum(measures["charged"]) == 5 * 60
    assert (len(measures["error"]), len(measures["least"])) == (5, 5)
    assert measures["newcomers"] == [0, 0, 0, 0, 1]
    assert measures["most"][-1] == max(measures["charged"][:100])
    np.testing.assert_allclose(measures["mean"][:4], [0.6, 1.2, 1.8, 2.4])
    assert (measures["price"], measures["pure"], measures["epsilon"]) == (0.4, None, None)
    # With one hypothesis more to choose from, nobody fares worse where the second phase starts.
    spare = drift.play(two_phases | {SPARE: 1}).measures["error"]
    assert spare[:2] == measures["error"][:2]
    assert spare[2] <= measures["error"][2]


def test_a_phase_starts_from_the_best_that_there_was_or_anew(two_phases: dict[str, Any]) -> None:
    kept, anew = (
        drift.play(two_phases | {"noise-multiplier": 0.0, "start-from": start}).measures["error"]
        for start in (BEFORE, FRESH)
    )
    assert kept[:2] == anew[:2]
    assert kept[2] <= min(kept[:2])
    assert anew[2] not in (kept[2], anew[0]), "drawn anew, and not the same again"


def test_the_least_error_is_that_of_the_true_parameters(tmp_path: Path) -> None:
    write_leaf(tmp_path / "data.json", *world()[0])
    # Each client's ten rows hold u ~ U[0, 1): a root mean square of sqrt(1/3), a little less on average.
    assert 0.55 < drift._least(tmp_path / "data.json") < math.sqrt(1 / 3)


# --- what is made of it


@pytest.mark.parametrize(
    ("errors", "changed", "rounds"),
    [
        ([2, 1, 1, 1, 2, 2], 0, 1),
        ([1, 2, 1, 1.09, 1.1, 1], 0, 2),
        ([1, 1, 2, 1, 1, 2], 0, math.inf),
        ([1, 1, 1, 1, 1, 1], 2, 2),
        ([1, 1, 1, 1.2, 1, 1], 1, math.inf),
    ],
)
def test_models_fit_again_when_three_errors_in_a_row_are_near(errors: list[float], changed: int, rounds: float) -> None:
    assert back_after(errors, [1.0] * len(errors), changed) == rounds


def test_the_tables_and_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "write_leaf", lambda *_: None)
    specs = drift.specs(tmp_path, seeds=2, quick=True)
    assert {spec.config["seed"] for spec in specs} == {2000, 2001}
    results = []
    for spec in specs:
        # Seed 2000 fits again after 3 rounds of each phase, 2001 never; a participation every other round.
        error = ([3.0] * 3 + [1.0] * (ROUNDS - 3)) * 7 if spec.config["seed"] == 2000 else [2.0] * 7 * ROUNDS
        most = ((np.arange(7 * ROUNDS) + 1) // 2).tolist()
        measures = {"error": error, "least": [1.0] * 7 * ROUNDS, "most": most, "mean": most, "newcomers": most}
        results.append(Result(spec, measures | {"price": 0.5, "pure": None, "epsilon": None}, tmp_path))
    drift.tables(results, tmp_path)
    rows = read_csv(tmp_path)
    assert len(rows) == 2 * len(PHASES)
    jump = rows[1]
    assert (jump["arm"], jump["phase"], jump["runs"], jump["back"]) == ("k = 2, kept", "one optimum jumps", "2", "1")
    assert (jump["after_the_change"], jump["in_the_end"], jump["rounds"]) == ("2.5", "1.5", "")
    # Rounds 31 to 33 bring one participation or two, at half a unit each: in rounds 32 of 30 + 3.
    assert jump["spent"] == "0.5"
    page = (tmp_path / "table.md").read_text()
    assert "| k = 2, kept | never (1 of 2) | never (1 of 2) |" in page
    assert {"drift.svg", "drift.png"} <= set(os.listdir(tmp_path))
