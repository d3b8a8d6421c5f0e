"""A run that was stopped goes on only from a folder that is as the run left it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import safe_open

from tests.helpers.drawing import leave_blank
from tests.helpers.errors import raises
from tests.helpers.paper import paper_run
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError
from umbel.server.history import State
from umbel.server.run_folder import RunFolder, _digest
from umbel.server.setup import Saved, Setup
from umbel.simulation import in_process

CONFIG = paper_run() | {"rounds": 4, "restarts": 1, "strategy": "group-privacy respawn=3"}

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UMBEL_HOME", str(tmp_path_factory.mktemp("home")))
        leave_blank(patch)
        return in_process.run(CONFIG)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to do damage to."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def saved(folder: Path, **changes: Any) -> Saved:
    return Saved.of(Setup.parse(CONFIG | {"rounds": 9, "resume": str(folder)} | changes))


def latest(change: Callable[[Arrays], Arrays], rounds: str = "") -> Damage:
    """Change arrays of latest.safetensors; with a number of rounds the digest fits them, as if a run had written so."""

    def do(folder: Path) -> None:
        file = folder / "latest.safetensors"
        with safe_open(file, "numpy") as opened:
            before = opened.metadata()
        arrays = change(safetensors.numpy.load_file(file))
        if rounds:
            before = {"rounds": f"{rounds} {_digest(arrays, rounds)} {before['rounds'].split(' ')[2]} "}
        safetensors.numpy.save_file(arrays, file, before)

    return do


def weight(value: Any) -> Damage:
    """Put other hypotheses in the file."""
    return latest(lambda arrays: arrays | {"weight": np.asarray(value)}, rounds="4")


def text(file: str, change: Callable[[str], str]) -> Damage:
    def do(folder: Path) -> None:
        (folder / file).write_text(change((folder / file).read_text()))

    return do


def other(digest: str) -> Callable[[str], str]:
    return lambda was: re.sub(rf'(?m)^{digest} = ".*"$', f'{digest} = "of others"', was, count=1)


def test_a_whole_folder_says_where_the_run_stands(copy: Path) -> None:
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    found = saved(copy)
    assert [entry.number for entry in found.state.history] == [0, 1, 2, 3, 4]
    assert found.state.stopped == ""
    assert sum(found.spent.values()) == sum(entry.releases for entry in found.state.history)
    assert list(found.kept) == ["respawn/idle", "respawn/told"]
    assert before == {file.name: file.read_bytes() for file in copy.iterdir()}, "nothing is written"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (latest(lambda arrays: arrays | {"strategy/respawn/idle": np.zeros(7, np.int64)}), "latest.safetensors"),
        (weight(np.zeros((2, 1, 3), np.float32)), "weight of each hypothesis is (1, 3), not (1, 2)"),
        (weight(np.zeros((3, 1, 2), np.float32)), "there are 3 hypotheses, not 1 to 2"),
        (latest(lambda arrays: {"bias": arrays["weight"]}, rounds="4"), "'weight' is missing"),
        (latest(lambda arrays: arrays, rounds="5"), "is of round 5, but history.jsonl has 5 lines"),
        (text("history.jsonl", lambda was: was[: len(was) // 2]), "line 3 of history.jsonl is not a round"),
        (text("history.jsonl", lambda was: "\n".join(was.splitlines()[1:])), "line 1 of history.jsonl is of round 1"),
        (text("outcome.json", lambda _: "[]"), "outcome.json does not say"),
        (text("nodes.json", lambda _: "[]"), "nodes.json names no node"),
        (text("participations.jsonl", lambda was: was[:-3]), "participations.jsonl says that there were 21 releases"),
        (text("participations.jsonl", lambda was: was + '{"99999": 3}\n'), "participations.jsonl says that there were"),
        (text("participations.jsonl", lambda was: '{"3": -30}\n' + was), "line 1 of participations.jsonl does not say"),
        (
            text("participations.jsonl", lambda _: json.dumps(dict.fromkeys(range(20), 9))),
            "says that there were 180 releases, 9 of one client, and history.jsonl 28, ",
        ),
        (text("config.toml", lambda _: "config = [1]"), "config.toml has no table config"),
    ],
)  # fmt: skip
def test_damage_is_told_in_one_line(copy: Path, damage: Damage, words: str) -> None:
    damage(copy)
    with raises(ConfigError, "config.run-damaged", f"resume: {copy}", words) as told:
        saved(copy)
    assert "\n" not in told.value.text


FILES = ["latest.safetensors", "history.jsonl", "participations.jsonl", "nodes.json", "outcome.json"]


@pytest.mark.parametrize(
    ("damage", "changes", "parts"),
    [
        *((lambda copy, file=file: (copy / file).unlink(), {}, ("config.no-run", file)) for file in FILES),
        (lambda copy: None, {"rounds": 4}, ("config.resume-done", "rounds", "4")),
        # The best round so far was the best on rows that are not there any more.
        (text("config.toml", other("data")), {}, ("config.resume-data", "synthetic")),
        (text("config.toml", other("frozen")), {}, ("config.other-frozen", "pretrained")),
        (lambda copy: None, {"seed": 7}, ("config.resume-changed", "seed", "7")),
    ],
)
def test_a_run_that_cannot_go_on_is_told(copy: Path, damage: Any, changes: dict[str, Any], parts: Any) -> None:
    damage(copy)
    with raises(ConfigError, *parts):
        saved(copy, **changes)


def to_start_from(folder: Path, weights: Any) -> None:
    """Put other hypotheses in the place of the best."""
    tensors = {"weight": torch.as_tensor(weights)}
    safetensors.torch.save_file(tensors, folder / "hypotheses.safetensors")


@pytest.mark.parametrize(
    ("damage", "changes", "parts"),
    [
        (None, {"seed": CONFIG["seed"]}, ("config.start-from-seed", "seed")),
        (None, {"hypotheses": 1}, ("config.start-from-misfit", "hypotheses", "2")),
        (None, {"strategy": "fedavg"}, ("config.start-from-misfit", "strategy", "1")),
        (None, {"model": "mlp inputs=2 hidden=3 outputs=1"}, ("config.start-from-misfit", "weight")),
        (None, {"dataset": "hospital"}, ("config.start-from-misfit", "dataset=synthetic")),
        (np.full((2, 1, 2), np.nan, np.float32), {}, ("config.run-damaged", "hypotheses")),
        (np.full((2, 1, 2), 3e38, np.float32), {}, ("config.run-damaged", "38")),
        (np.ones((2, 1, 2)), {}, ("config.run-damaged", "hypotheses")),
        (np.ones((0, 1, 2), np.float32), {}, ("config.run-damaged", "hypotheses", "0")),
        (torch.ones(2, 1, 2, dtype=torch.bfloat16), {}, ("config.run-damaged",)),  # which NumPy lacks
        ("other = 1", {}, ("config.run-damaged", "seed")),
        ("version = 1\n[config]\nseed = true", {}, ("config.run-damaged", "seed")),
        # The same shapes, trained on top of another body.
        ('version = 1\nfrozen = "of another body"\n[config]\nseed = 0\n', {}, ("config.other-frozen", "pretrained")),
        ("", {}, ("config.no-run",)),
    ],
    ids=str,
)
def test_what_a_run_cannot_start_from_is_told(copy: Path, damage: Any, changes: dict[str, Any], parts: Any) -> None:
    if isinstance(damage, str) and not damage:
        (copy / "hypotheses.safetensors").unlink()
    elif isinstance(damage, str):
        (copy / "config.toml").write_text(damage)
    elif damage is not None:
        to_start_from(copy, damage)
    with raises(ConfigError, *parts, "start-from" if "frozen" not in parts[0] else ""):
        _ = Setup.parse(CONFIG | {"start-from": str(copy), "seed": 5} | changes).first


def test_a_run_that_patience_ended_continues_with_more_as_if_it_had_had_that_from_the_start(
    umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_blank(monkeypatch)

    def ended(patience: int, **changes: Any) -> tuple[Path, State]:
        folder = in_process.run(CONFIG | {"rounds": 60, "patience": patience} | changes)
        return folder, RunFolder(folder).read({"weight": (1, 2)})[0]

    shorter, short = ended(1)
    assert (short.stopped, short.stale) == ("no better hypotheses in 1 validation", 1)
    _, continued = ended(3, resume=str(shorter))
    _, whole = ended(3)
    assert len(short.history) < len(whole.history) < 60
    assert continued.stopped == whole.stopped
    plain = [[replace(entry, seconds=0, stages={}) for entry in one.history] for one in (continued, whole)]
    assert plain[0] == plain[1]
    for mine, theirs in ((continued.hypotheses, whole.hypotheses), (continued.best, whole.best)):
        np.testing.assert_array_equal(mine["weight"], theirs["weight"])
