"""What a run leaves behind: files that parse, each replaced whole or not at all."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import tomllib
from collections.abc import Callable
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from attacks.leak_meter import Leak
from protocol.home import write_atomically
from protocol.messages import Hosting
from server.rounds import Round, State
from server.run_folder import RunFolder, spend

LATEST = {"fc.weight": np.arange(4, dtype=np.float32).reshape(2, 1, 2), "fc.bias": np.zeros((2, 1), np.float32)}
BEST = {name: value + 10 for name, value in LATEST.items()}


def entry(number: int, **changes: Any) -> Round:
    """A round of five clients, all of which released."""
    values: dict[str, Any] = {
        "number": number,
        "loss": 0.5,
        "metric": 0.5,
        "asked": 5,
        "releases": 5,
        "lost_nodes": 0,
        "groups": [3, 2],
        "nearest": [0.5, 0.5],
        "moved": True,
        "best_round": 1,
        "median_participations": 1.5,
        "max_participations": 3,
        "seconds": 0.25,
    }
    return Round(**values | changes)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "first")


@pytest.fixture
def state() -> State:
    return State(hypotheses=LATEST, best=BEST, history=[entry(1), entry(2, loss=None, metric=None)])


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


# --- one file


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", b"old")
    write_atomically(tmp_path / "file", b"new and longer")
    assert contents(tmp_path) == {"file": b"new and longer"}


def fail(*_: Any) -> None:
    raise OSError("no space left on device")


FAILURES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "while writing": lambda patch: patch.setattr(os, "fsync", fail),
    "while replacing": lambda patch: patch.setattr(Path, "replace", fail),
}


@pytest.mark.parametrize("prepare", FAILURES.values(), ids=FAILURES.keys())
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[pytest.MonkeyPatch], None]
) -> None:
    write_atomically(tmp_path / "file", b"old")
    with monkeypatch.context() as patch:
        prepare(patch)
        with pytest.raises(OSError, match="no space left"):
            write_atomically(tmp_path / "file", b"new")
        with pytest.raises(OSError, match="no space left"):
            write_atomically(tmp_path / "another", b"new")
    assert contents(tmp_path) == {"file": b"old"}


def test_a_file_is_on_disk_before_it_takes_the_place_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "file", b"old")
    seen = []
    fsync = os.fsync

    def look(descriptor: int) -> None:
        scratch = next(file for file in tmp_path.iterdir() if file.name != "file")
        seen.append(((tmp_path / "file").read_bytes(), scratch.read_bytes()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    write_atomically(tmp_path / "file", b"new")
    assert seen == [(b"old", b"new")]


def test_a_leftover_of_a_killed_write_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / f".file.{os.getpid()}.tmp").write_bytes(b"half a fi")
    write_atomically(tmp_path / "file", b"new")
    assert contents(tmp_path) == {"file": b"new"}


# --- the folder


def test_the_folder_is_made_with_its_parents_and_may_be_there(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    for _ in range(2):
        assert RunFolder(path).path == path
    assert path.is_dir()


def test_a_round_leaves_arrays_history_and_ledger(folder: RunFolder, state: State) -> None:
    folder.write_round(state, np.array([0, 2, 0, 3]), Fraction(11, 3))
    assert sorted(contents(folder.path)) == [
        "history.jsonl",
        "hypotheses.safetensors",
        "latest.safetensors",
        "ledger.csv",
        "outcome.json",
    ]


def test_hypotheses_are_the_best_and_latest_are_the_next(folder: RunFolder, state: State) -> None:
    folder.write_round(state, np.array([1]), Fraction(1))
    for name, arrays in (("hypotheses", BEST), ("latest", LATEST)):
        read = safetensors.numpy.load_file(folder.path / f"{name}.safetensors")
        assert set(read) == set(arrays)
        for key, value in arrays.items():
            np.testing.assert_array_equal(read[key], value)
            assert read[key].dtype == np.float32


def test_arrays_need_not_lie_in_a_row_in_memory(folder: RunFolder) -> None:
    turned = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3).T}
    folder.write_round(State(hypotheses=turned, best=turned), np.array([1]), None)
    read = safetensors.numpy.load_file(folder.path / "latest.safetensors")
    assert read["weight"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_history_has_a_line_a_round(folder: RunFolder, state: State) -> None:
    folder.write_round(state, np.array([1]), Fraction(1))
    lines = (folder.path / "history.jsonl").read_text().splitlines()
    rounds = [Round(**json.loads(line)) for line in lines]
    assert rounds == state.history
    assert json.loads(lines[1])["loss"] is None


def test_the_ledger_lists_the_clients_that_released_and_what_they_spent(folder: RunFolder, state: State) -> None:
    folder.write_round(state, np.array([0, 2, 0, 3]), Fraction(11, 3))
    rows = list(csv.DictReader((folder.path / "ledger.csv").open()))
    assert rows == [
        {"client": "1", "participations": "2", "spent": "7.333333333"},
        {"client": "3", "participations": "3", "spent": "11"},
    ]


def test_without_noise_nothing_bounds_what_was_spent(folder: RunFolder, state: State) -> None:
    folder.write_round(state, np.array([0, 1]), None)
    (row,) = csv.DictReader((folder.path / "ledger.csv").open())
    assert float(row["spent"]) == math.inf
    assert row["client"] == "1"


def test_every_round_replaces_the_last(folder: RunFolder, state: State) -> None:
    folder.write_round(state, np.array([1]), Fraction(1))
    state.history.append(entry(3))
    state.best = LATEST
    folder.write_round(state, np.array([2]), Fraction(1))
    assert len((folder.path / "history.jsonl").read_text().splitlines()) == 3
    assert (folder.path / "ledger.csv").read_text() == "client,participations,spent\n0,2,2\n"
    best, latest = (
        safetensors.numpy.load_file(folder.path / f"{name}.safetensors") for name in ("hypotheses", "latest")
    )
    assert {name: value.tolist() for name, value in best.items()} == {name: v.tolist() for name, v in latest.items()}


def test_what_stays_as_it_was_is_not_written_again(folder: RunFolder, state: State) -> None:
    """Each write waits for the disk."""

    def written() -> set[str]:
        folder.write_nodes([(7, Hosting(1, 0))])
        folder.write_round(state, np.array([1]), Fraction(1))
        files = {file.name for file in folder.path.iterdir() if file.stat().st_mtime > 0}
        for file in folder.path.iterdir():
            os.utime(file, (0, 0))
        return files

    always = {"history.jsonl", "outcome.json", "ledger.csv", "latest.safetensors"}
    sometimes = {"hypotheses.safetensors", "nodes.json"}
    assert written() == always | sometimes
    assert written() == always
    state.best = LATEST
    assert written() == always | {"hypotheses.safetensors"}


@pytest.mark.parametrize("prepare", FAILURES.values(), ids=FAILURES.keys())
def test_a_round_that_cannot_be_written_leaves_the_last_one_readable(
    folder: RunFolder, state: State, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[pytest.MonkeyPatch], None]
) -> None:
    folder.write_round(state, np.array([1]), Fraction(1))
    before = contents(folder.path)
    state.history.append(entry(3))
    state.hypotheses = BEST
    with monkeypatch.context() as patch:
        prepare(patch)
        with pytest.raises(OSError, match="no space left"):
            folder.write_round(state, np.array([2]), Fraction(1))
    assert contents(folder.path) == before


LEAKS = [
    Leak(1, 7, choice=True, norm=0.25, update=0.5),
    Leak(1, 7, labels=-0.125),
    Leak(2, 7, predictions=0.96),
    Leak(2, 7),
]


def test_a_run_is_read_again_as_it_was_written(folder: RunFolder, state: State, run_config: dict[str, Any]) -> None:
    state.stopped, state.remarks, state.leaks = "it knows enough", ["It stole all.", "Größe ν = 3"], LEAKS
    state.best_round, state.best_loss, state.stale = 1, 0.5, 0
    folder.write_config(run_config)
    folder.write_round(state, np.array([0, 2, 0, 3]), Fraction(11, 3))
    saved, read, spent = RunFolder(folder.path).read()
    assert saved["config"] == run_config
    assert spent == {1: 2, 3: 3}
    for name in ("stopped", "remarks", "leaks", "history", "best_round", "best_loss", "stale"):
        assert getattr(read, name) == getattr(state, name), name
    for ours, theirs in ((read.hypotheses, LATEST), (read.best, BEST)):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_the_outcome_is_for_machines_too(folder: RunFolder, state: State) -> None:
    state.leaks = LEAKS[:1]
    folder.write_round(state, np.array([1]), Fraction(1))
    outcome = json.loads((folder.path / "outcome.json").read_text())
    assert (outcome["stopped"], outcome["remarks"]) == ("", [])
    assert outcome["leaks"] == [
        {"round": 1, "client": 7, "choice": True, "norm": 0.25, "update": 0.5, "labels": None, "predictions": None}
    ]


def test_findings_are_a_table_with_the_strategys_own_columns(folder: RunFolder) -> None:
    folder.write_findings([{"client": 3, "error": 0.5}, {"client": 4, "error": None}])
    assert contents(folder.path) == {"findings.csv": b"client,error\n3,0.5\n4,\n"}


def test_the_config_is_saved_with_the_versions_it_ran_with(folder: RunFolder, run_config: dict[str, Any]) -> None:
    folder.write_config(run_config)
    saved = tomllib.loads((folder.path / "config.toml").read_text())
    assert saved["config"] == run_config
    assert saved["config"]["seed"] == 0
    assert saved["versions"] == {
        "python": platform.python_version(),
        **{package: version(package) for package in ("flwr", "torch", "numpy", "safetensors")},
    }


def test_the_releases_are_saved_as_they_are(folder: RunFolder) -> None:
    folder.write_releases(b"tensors")
    assert contents(folder.path) == {"releases.safetensors": b"tensors"}


def test_the_report_is_saved_as_it_is(folder: RunFolder) -> None:
    folder.write_report("<p>1 000 €</p>")
    assert (folder.path / "report.html").read_text(encoding="utf-8") == "<p>1 000 €</p>"


# --- what it costs


@pytest.mark.parametrize(
    ("participations", "cost", "spent"),
    [
        (0, Fraction(11, 3), 0.0),
        (3, Fraction(11, 3), 11.0),
        (1.5, Fraction(1, 3), 0.5),
        (10, Fraction(2, 5), 4.0),
        (0, None, 0.0),
        (1, None, math.inf),
    ],
)
def test_spending_is_participations_times_cost(participations: float, cost: Fraction | None, spent: float) -> None:
    assert spend(participations, cost) == spent
