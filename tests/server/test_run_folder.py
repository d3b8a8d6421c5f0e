"""What a run leaves behind: files that parse, each replaced whole or not at all, or added to by lines."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from tests.helpers.disk import Killed, kill_when
from tests.helpers.history import a_round
from umbel.protocol.arrays import Arrays
from umbel.protocol.home import write_atomically
from umbel.protocol.release import Clipping, Kind, Release
from umbel.protocol.tasks import Hosting
from umbel.server import run_folder
from umbel.server.history import State
from umbel.server.run_folder import RunFolder

LATEST = {"fc.weight": np.arange(4, dtype=np.float32).reshape(2, 1, 2), "fc.bias": np.zeros((2, 1), np.float32)}
BEST = {name: value + 10 for name, value in LATEST.items()}
SHAPES = {name: value.shape[1:] for name, value in LATEST.items()}


def costing(n: int, noise_multiplier: float, mode: Clipping = Clipping.UPDATE, **changes: Any) -> Release:
    """A release whose paper's budget is n / nu."""
    return Release(Kind.TRAIN, n, noise_multiplier, mode, **changes)


ELEVEN_THIRDS, ONE, BARE = costing(11, 3.0), costing(1, 1.0), costing(1, 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "first")


@pytest.fixture
def state() -> State:
    return State(LATEST, BEST, history=[a_round(0), a_round(1), a_round(2, loss=None, metric=None)])


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


# --- one file, of which `tests/protocol/test_home.py` knows the rest


# --- one file, of which `tests/protocol/test_home.py` knows the rest


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


# --- the folder


PUBLIC = Clipping.PUBLIC


@pytest.mark.parametrize(
    ("release", "epsilon", "paper"),
    [
        (ELEVEN_THIRDS, "none", "11"),
        # 2 n / nu a participation, and the choice on top; exactly so, and not by floats.
        (costing(11, 3.0, PUBLIC), "22", "11"),
        (costing(11, 3.0, PUBLIC, hypotheses=4, choice_epsilon=0.1), "22.3", "11"),
        (costing(11, 3.0, PUBLIC, hypotheses=4), "none", "11"),
        (costing(11, 3.0, hypotheses=4, choice_epsilon=0.1), "none", "11"),
        (costing(11, 3.0, PUBLIC, mechanism="gaussian"), "none", "none"),
        (costing(11, 0.0, PUBLIC), "none", "none"),
        (BARE, "none", "none"),
    ],
)
def test_the_ledger_says_none_where_nothing_bounds_what_was_given_away(
    folder: RunFolder, state: State, release: Release, epsilon: str, paper: str
) -> None:
    """Epsilon is pure, between any two data sets of the client; who never released is not listed."""
    folder.write_round(state, np.array([0, 3, 0]), release, {})
    assert (folder.path / "ledger.csv").read_text() == (
        f"client,participations,epsilon,paper_budget\n1,3,{epsilon},{paper}\n"
    )


def test_what_stays_as_it_was_is_not_written_again(folder: RunFolder, state: State) -> None:
    """Each write waits for the disk."""

    def written() -> set[str]:
        folder.write_nodes([(7, Hosting(1, 0))])
        folder.write_round(state, np.array([1]), ONE, {})
        files = {file.name for file in folder.path.iterdir() if file.stat().st_mtime > 0}
        for file in folder.path.iterdir():
            os.utime(file, (0, 0))
        return files

    sometimes = {"latest.safetensors", "hypotheses.safetensors", "nodes.json", "outcome.json"}
    grown = {"history.jsonl", "participations.jsonl", "ledger.csv"}
    assert written() == sometimes | grown
    assert written() == set()
    state.best, state.best_loss = LATEST, 0.5
    assert written() == {"latest.safetensors", "hypotheses.safetensors"}
    state.stopped = "it knows enough"
    assert written() == {"outcome.json", "history.jsonl", "latest.safetensors"}, "its last round is complete"


def test_a_run_is_read_again_as_it_was_written(folder: RunFolder, state: State, run_config: dict[str, Any]) -> None:
    """What the strategy keeps is in one file with the hypotheses, so that both are of one round whenever it ends."""
    keeps: dict[str, Any] = {
        "moments": np.arange(6.0).reshape(2, 3).T,
        "steps": np.array(7),
        "flags": np.array([True, False]),
        "fc.weight": np.float32([1, 2]),  # no parameter
        "none": np.zeros((0, 3), np.float32),
    }
    nodes = [(2**63, Hosting(3, 1)), (5, Hosting(0, 2))]
    state.stopped = "Größe ν = 3 is enough"
    state.best_round, state.best_loss, state.stale = 1, 0.5, 0
    folder.write_config(run_config)
    folder.write_nodes(nodes)
    folder.write_round(state, np.array([0, 1]), ELEVEN_THIRDS, keeps)
    folder.write_round(state, np.array([0, 2, 0, 3]), ELEVEN_THIRDS, keeps)  # clients of nodes that join come behind
    again = RunFolder(folder.path)
    read, spent, kept = again.read(SHAPES)
    assert again.read_nodes() == nodes
    assert json.loads((folder.path / "outcome.json").read_text()) == {"stopped": state.stopped}, "for machines too"
    assert again.read_config()["config"] == run_config
    assert again.read_config()["versions"] == {
        "python": platform.python_version(),
        **{package: version(package) for package in ("flwr", "torch", "numpy", "safetensors")},
    }
    assert spent == {1: 2, 3: 3}
    assert kept.keys() == keeps.keys()
    for name, value in keeps.items():
        np.testing.assert_array_equal(kept[name], value, strict=True)
        assert kept[name].flags.writeable
    stored = safetensors.numpy.load_file(folder.path / "latest.safetensors")
    assert stored.keys() == {*LATEST, *(f"strategy/{name}" for name in keeps)}
    for name in ("stopped", "history", "best_round", "best_loss", "stale"):
        assert getattr(read, name) == getattr(state, name), name
    best = safetensors.numpy.load_file(folder.path / "hypotheses.safetensors")
    for ours, theirs in ((read.hypotheses, LATEST), (read.best, BEST), ({name: best[name] for name in BEST}, BEST)):
        assert list(ours) == list(theirs), "in the model's order"
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], strict=True)


def test_patience_begins_anew_with_another_number_of_hypotheses(folder: RunFolder, state: State) -> None:
    state.history[-1] = a_round(2)
    state.best_round, state.best_loss, state.stale = 1, 0.5, 1
    folder.write_round(state, np.array([1]), ONE, {})
    assert RunFolder(folder.path).read(SHAPES)[0].stale == 1
    state.hypotheses = state.best = {name: value[:1] for name, value in LATEST.items()}
    state.best_loss = np.inf
    folder.write_round(state, np.array([1]), ONE, {})
    read, _, _ = RunFolder(folder.path).read(SHAPES)
    assert (read.best_loss, read.stale) == (np.inf, 0)


def kill_in_round_3(folder: RunFolder, state: State, **found: Any) -> None:
    """Write two rounds and all of a third but `latest.safetensors`, in which `found` was found."""
    state.best_round, state.best_loss = 1, 0.5
    folder.write_round(state, np.array([1]), ONE, {"steps": np.array(2)})
    latest = (folder.path / "latest.safetensors").read_bytes()
    vars(state).update(found)
    state.history[-1] = a_round(2, best_round=state.best_round)
    state.history.append(a_round(3, best_round=state.best_round))
    folder.write_round(state, np.array([2]), ONE, {"steps": np.array(3)})
    (folder.path / "latest.safetensors").write_bytes(latest)


def test_rounds_that_latest_does_not_stand_for_are_forgotten(folder: RunFolder, state: State) -> None:
    """The run was killed between the files of a round: it does that round again."""
    kill_in_round_3(folder, state, best=LATEST, best_round=2)
    read, spent, kept = RunFolder(folder.path).read(SHAPES)
    assert [one.loss for one in read.history] == [0.5, 0.5, None]
    assert (read.best_round, read.best_loss, read.stale) == (1, math.inf, 0), "the loss was that of others"
    assert int(kept["steps"]) == 2
    assert spent == {0: 2}, "what was charged stays charged"
    resumed = RunFolder(folder.path)
    resumed.write_latest(read, kept)
    assert RunFolder(folder.path).read(SHAPES)[0].best_loss == math.inf, "however often it is killed before"


def test_the_best_keep_their_loss_where_a_round_that_was_not_finished_had_found_no_better_ones(
    folder: RunFolder, state: State
) -> None:
    kill_in_round_3(folder, state)
    read, _, _ = RunFolder(folder.path).read(SHAPES)
    assert (read.best_round, read.best_loss, read.stale) == (1, 0.5, 0)


def test_a_run_that_goes_on_is_read_as_it_was_after_one_of_its_rounds(
    folder: RunFolder, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_round(state, np.array([1]), ONE, {})
    read_best = RunFolder.read_best

    def meanwhile(reader: RunFolder) -> Arrays:
        state.hypotheses = {name: value + 1 for name, value in LATEST.items()}
        state.history.append(a_round(3))
        folder.write_round(state, np.array([2]), ONE, {})
        return read_best(reader)

    monkeypatch.setattr(RunFolder, "read_best", meanwhile)
    read, _, _ = RunFolder(folder.path).read(SHAPES)
    assert [one.number for one in read.history] == [0, 1, 2]
    np.testing.assert_array_equal(read.hypotheses["fc.bias"], LATEST["fc.bias"])


# --- what grows


GROWN = ["history.jsonl", "participations.jsonl"]


def play(folder: RunFolder, state: State, participations: NDArray[np.int64], rounds: int, asked: int) -> None:
    """Do rounds in each of which the next clients release."""
    for number in range(len(state.history), len(state.history) + rounds):
        state.history.append(a_round(number, releases=asked))
        participations[np.arange(number * asked, (number + 1) * asked) % len(participations)] += 1
        folder.write_round(state, participations, ONE, {})


def test_a_round_writes_as_much_however_many_there_were(
    folder: RunFolder, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is always other clients' turn; of the table of them all, ten rows a release."""
    written: Counter[bool] = Counter()

    def counted(write: Callable[..., None]) -> Callable[..., None]:
        def count(path: Path, content: bytes, **how: bool) -> None:
            ledger = path.name == "ledger.csv"
            written[ledger] += content.count(b"\n") - 1 if ledger else len(content)
            write(path, content, **how)

        return count

    for name in ("write_atomically", "append"):
        monkeypatch.setattr(run_folder, name, counted(getattr(run_folder, name)))
    state.history, participations = [a_round(0)], np.zeros(30_000, np.int64)
    seen = []
    for rounds in (10, 100, 290, 100):
        written.clear()
        play(folder, state, participations, rounds, asked=50)
        seen.append(written[False] / rounds)
        assert written[True] < 15 * 50 * rounds
    assert seen[3] < 1.1 * seen[1], "clients have longer numbers, and nothing else"
    assert len(folder.read_participations()) == 25_000


def test_the_ledger_lacks_no_more_than_a_tenth_while_a_run_goes_on_and_nothing_at_its_end(
    folder: RunFolder, state: State
) -> None:
    state.history, participations = [a_round(0)], np.zeros(2000, np.int64)
    behind = []
    for _ in range(40):
        play(folder, state, participations, 1, asked=20)
        rows = csv.DictReader((folder.path / "ledger.csv").open())
        behind.append(1 - sum(int(row["participations"]) for row in rows) / participations.sum())
    assert behind[:10] == [0] * 10, "as long as a round's releases are a tenth of the table"
    assert 0 < max(behind) < 0.1
    state.stopped = "it knows enough"
    folder.write_round(state, participations, ONE, {})
    rows = csv.DictReader((folder.path / "ledger.csv").open())
    assert {int(row["client"]): int(row["participations"]) for row in rows} == folder.read_participations()


@pytest.mark.parametrize("torn", ["{", '{"3": 1', "\0" * 9 + "\n", "ÿ"])
@pytest.mark.parametrize("file", GROWN)
def test_a_line_that_a_killed_run_left_half_is_none(folder: RunFolder, state: State, file: str, torn: str) -> None:
    folder.write_round(state, np.array([0, 2]), ONE, {})
    with (folder.path / file).open("ab") as opened:
        opened.write(torn.encode("latin-1"))
    read, spent, _ = RunFolder(folder.path).read(SHAPES)
    assert [one.number for one in read.history] == [0, 1, 2]
    assert spent == {1: 2}
    assert RunFolder(folder.path).read_history() == read.history


@pytest.mark.parametrize("file", GROWN)
def test_only_the_last_line_may_be_half(folder: RunFolder, state: State, file: str) -> None:
    play(folder, state, np.array([0, 2, 0, 0]), 2, asked=1)
    content = (folder.path / file).read_text()
    (folder.path / file).write_text(content.replace("}\n", "\n", 1))
    with pytest.raises(ValueError, match=f"line 1 of {file}"):
        folder.read(SHAPES)


def test_a_run_that_goes_on_leaves_nothing_of_rounds_that_it_had_begun(folder: RunFolder, state: State) -> None:
    """Neither whole ones nor half a line; what was charged in them stays charged."""
    folder.write_round(state, np.array([0, 2]), ONE, {})
    latest = (folder.path / "latest.safetensors").read_bytes()
    state.history.append(a_round(3, releases=5))
    folder.write_round(state, np.array([1, 2]), ONE, {})
    (folder.path / "latest.safetensors").write_bytes(latest)
    for file in GROWN:
        with (folder.path / file).open("a") as opened:
            opened.write('{"4')
    again = RunFolder(folder.path)
    read, spent, _ = again.read(SHAPES)
    participations = np.array([spent[0], spent[1]])
    for number in (3, 4):
        read.history.append(a_round(number, releases=1))
        participations[1] += 1
        again.write_round(read, participations, ONE, {})
    assert RunFolder(folder.path).read_history() == read.history
    assert again.read_participations() == {0: 1, 1: 4}
    assert (folder.path / "participations.jsonl").read_text() == '{"0": 1, "1": 3}\n{"1": 1}\n'


@pytest.mark.parametrize("fault", ["half a line", "while writing", "while replacing"])
def test_a_round_that_cannot_be_written_leaves_the_last_one_and_the_disk_may_have_room_again(
    folder: RunFolder, state: State, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    folder.write_round(state, np.array([1]), ONE, {})
    before = RunFolder(folder.path).read(SHAPES)[0]
    state.history.append(a_round(3))
    state.hypotheses = BEST
    with monkeypatch.context() as patch:
        if fault == "half a line":
            kill_when(patch, lambda path: path.name == "history.jsonl")
        else:
            patch.setattr(
                *((os, "fsync") if fault == "while writing" else (Path, "replace")), Mock(side_effect=OSError)
            )
        with pytest.raises((Killed, OSError)):
            folder.write_round(state, np.array([2]), ONE, {})
    read = RunFolder(folder.path).read(SHAPES)[0]
    assert read.history == before.history
    np.testing.assert_array_equal(read.hypotheses["fc.bias"], before.hypotheses["fc.bias"])
    folder.write_round(state, np.array([2]), ONE, {})
    read, spent, _ = RunFolder(folder.path).read(SHAPES)
    assert (read.history, spent) == (state.history, {0: 2})


# --- the rest


def test_a_run_is_its_owners_alone_at_any_umask(tmp_path: Path, state: State) -> None:
    os.umask(0)
    folder = RunFolder.make(tmp_path, "run")
    folder.write_config({"rounds": 3})
    folder.write_round(state, np.ones(3, np.int64), costing(3, 1.0), {})
    assert len(contents(folder.path)) > 5
    folder.write_report("<html></html>")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.path.iterdir()} == {0o600}
    made = [RunFolder.make(tmp_path / "runs", "name").path for _ in range(3)]
    assert [path.name for path in made] == ["name", "name-2", "name-3"], "no other run has it"
