"""A sweep does each run once, saves it at once, and goes on where it was."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import numpy as np
import pytest
from filelock import FileLock
from typer.testing import CliRunner

import umbel.simulation.sweep
import umbel_lab.experiments.synthetic
from tests.helpers.errors import raises
from umbel.data import find_dataset
from umbel.protocol.errors import DiskError, SweepError
from umbel.server.run import Run
from umbel.simulation.in_process import run_config
from umbel.simulation.sweep import Finished, Result, Spec, _digest, finish, made_by, sweep
from umbel_lab.experiments import frontier, synthetic
from umbel_lab.experiments.__main__ import app
from umbel_lab.experiments.scaffold import page, resumable, unpack

pytestmark = pytest.mark.rest

# As they are before tests put others in their place.
EACH, SAVE = umbel.simulation.sweep._each, umbel.simulation.sweep._save
SPECS = [Spec(f"seed{seed}", run_config("synthetic", rounds=2, seed=seed)) for seed in range(3)]


def _kill() -> NoReturn:
    raise KeyboardInterrupt


def test_each_run_leaves_what_the_apps_leave_and_is_not_done_again(in_process: list[str], tmp_path: Path) -> None:
    (result,) = sweep(SPECS[:1], tmp_path)
    assert {file.name for file in result.folder.iterdir()} == {
        "config.toml", "history.jsonl", "hypotheses.safetensors", "latest.safetensors", "ledger.csv", "outcome.json",
        "participations.jsonl", "result.json", "trace.npz",
    }  # fmt: skip
    finished = finish(SPECS[0].config)
    assert finished.state is not None
    np.testing.assert_array_equal(result.hypotheses["weight"], finished.state.best["weight"])
    assert [entry["loss"] for entry in result.history] == [entry.loss for entry in finished.state.history]
    assert result.trace.keys() == finished.trace.keys()
    for name, kept in result.trace.items():
        np.testing.assert_array_equal(kept, finished.trace[name])
    again = sweep(SPECS, tmp_path)
    assert in_process == ["seed0", "seed1", "seed2"]
    assert [one.spec for one in again] == SPECS, "in the order asked for"
    assert again[0].measures == result.measures


def test_a_long_run_resumes_until_it_is_saved(
    umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a full disk would cost the hours that it took."""
    spec = Spec("long", run_config("synthetic", rounds=3, patience=0))
    finished = resumable(spec.config)
    assert finished.saved_in is not None
    with FileLock(finished.saved_in / ".lock"), raises(SweepError, "sweep.running", finished.saved_in):
        resumable(spec.config)  # of another sweep, which would write to the same folder
    whole, before = finished.state, Run.before_round
    shutil.rmtree(finished.saved_in)
    with monkeypatch.context() as patched:  # killed before its last round
        patched.setattr(Run, "before_round", lambda run, r, arrays: _kill() if r == 3 else before(run, r, arrays))
        with pytest.raises(KeyboardInterrupt):
            resumable(spec.config)
    finished = resumable(spec.config)
    assert (finished.state and whole) is not None
    assert [one.loss for one in finished.state.history] == [one.loss for one in whole.history]
    for name, value in whole.hypotheses.items():
        np.testing.assert_array_equal(finished.state.hypotheses[name], value)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with raises(DiskError, "disk.full", tmp_path):
            SAVE(spec, finished, "", tmp_path, resumable)
    assert finished.saved_in.is_dir()
    SAVE(spec, finished, "", tmp_path, resumable)
    assert not finished.saved_in.exists()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("other", ["configuration", "code", "data", "result", "new setting", "changed setting"])
def test_what_is_torn_or_made_in_another_way_is_done_again(
    other: str, keep: bool, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of earlier code are kept when asked, also where a setting is new that has its default; the tables tell."""
    data = tmp_path / "data.json"
    data.write_bytes(find_dataset("synthetic").read_bytes())
    spec, new = (Spec(one.name, one.config | {"dataset": str(data)}) for one in SPECS[:2])
    (first,) = sweep([spec], tmp_path)
    file = first.folder / "result.json"
    document = json.loads(file.read_text())
    if other in ("code", "new setting", "changed setting"):
        monkeypatch.setattr(umbel.simulation.sweep, "_digest", lru_cache(lambda *_: "changed"))
        document["config"].pop({"new setting": "patience", "changed setting": "rounds"}.get(other, ""), None)
    file.write_text(json.dumps(document))
    if other == "data":
        data.write_text(data.read_text().replace("Sec. 5.1", "Section 5.1"))
    elif other == "result":
        file.write_text(file.read_text()[: file.stat().st_size // 2])
    changes = {"noise-multiplier": 1.0} if other == "configuration" else {}
    again = sweep([Spec("seed0", spec.config | changes), new], tmp_path, keep=keep)
    kept = keep and other in ("code", "new setting")
    assert in_process == ["seed0"] * (1 if kept else 2) + ["seed1"]
    said = [section.title for section in page("Runs", [], [], again).sections]
    assert ("Code" in said) == kept


def test_two_sweeps_do_not_share_a_folder_nor_two_runs_a_name(in_process: list[str], tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock"), raises(SweepError, "sweep.running", tmp_path):
        sweep(SPECS, tmp_path)
    with raises(SweepError, "sweep.same-name", "2 runs", "'seed0'"):
        sweep([SPECS[0], Spec("seed0", SPECS[1].config)], tmp_path)
    assert in_process == []


@pytest.mark.parametrize(
    "line",
    [
        '{"name": "../out", "history": []}', '{"name": "", "history": []}', "[]", "{}", "{", "[" * 100_000,
        '{"name": "a", "history": 3}', r'{"name": "a\u0000", "history": []}', r'{"name": "a\u001b[2J", "history": []}',
    ],
)  # fmt: skip
def test_packed_runs_of_somebody_else_stay_in_the_folder(line: str, tmp_path: Path) -> None:
    with raises(SweepError, "sweep.not-packed"):
        unpack(['{"name": "good", "history": []}', line], tmp_path / "sweep")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("strategy", "{}:Mine"),
        ("strategy", "flower:{}:Theirs"),
        ("model", "{}:network width=3"),
        *((key, "{}:own") for key in ("loss", "metric", "mechanism")),
        ("observers", "umbel_lab.attacks.pac_attack:PacAttack; {}:Watch"),
    ],
)
def test_the_users_own_is_part_of_the_code(
    key: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As is the module that does the runs."""
    monkeypatch.syspath_prepend(tmp_path)
    config, made = SPECS[0].config | {key: value.format("umbel_test_variant")}, set()
    for text in ("a = 1\n", "a = 2\n"):
        (tmp_path / "umbel_test_variant.py").write_text(text)
        _digest.cache_clear()
        made.add(made_by(config)["code"])
    made |= {made_by(SPECS[0].config, task)["code"] for task in (finish, frontier.play)}
    assert len(made) == 4


@pytest.mark.parametrize("key", ["pretrained", "start-from"])
def test_so_are_the_weights_that_a_run_starts_from(key: str, in_process: list[str], tmp_path: Path) -> None:
    weights = tmp_path / "hypotheses.safetensors"
    config = SPECS[0].config | {key: str(weights if key == "pretrained" else tmp_path)}
    for content, done in ((b"some", 1), (b"some", 1), (b"other", 2)):  # in the same process, as in a notebook
        weights.write_bytes(content)
        sweep([Spec("one", config)], tmp_path, lambda _: Finished({}))
        assert len(in_process) == done


def fragile(config: Mapping[str, Any]) -> Finished:
    """Fail for seed 1."""
    if config["seed"] == 1:
        raise ValueError("no such luck")
    return finish(config)


def test_a_run_that_fails_stops_no_other_and_is_tried_again(in_process: list[str], tmp_path: Path) -> None:
    results = sweep(SPECS, tmp_path, fragile)
    assert [bool(result.error) for result in results] == [False, True, False]
    assert "ValueError: no such luck" in results[1].error
    assert (tmp_path / "failed" / "seed1.txt").read_text() == results[1].error
    again = sweep(SPECS, tmp_path, lambda config: finish(config))
    assert in_process == ["seed0", "seed1", "seed2", "seed1"]
    assert not again[1].error
    assert not list((tmp_path / "failed").iterdir())


# --- in workers


def die(config: Mapping[str, Any]) -> Finished:
    """Kill the worker for seed 1, as running out of memory does."""
    if config["seed"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(config)


def says_where_it_is(config: Mapping[str, Any]) -> Finished:
    import safetensors

    return Finished({"from": safetensors.__file__, "threads": os.environ["OMP_NUM_THREADS"]})


def test_workers_import_nothing_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes before all that is installed, and somebody may have sent it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "safetensors.py").write_text("raise ImportError('of somebody else')")
    [(_, found, error)] = EACH(SPECS[:1], says_where_it_is, 2)
    assert found is not None, error
    assert "site-packages" in found.measures["from"]
    assert found.measures["threads"] == "1"


@pytest.mark.slow
def test_runs_in_workers_give_what_they_give_in_process_and_a_worker_that_dies_is_a_failed_run(tmp_path: Path) -> None:
    # Two, for each of which there is a core: to start a worker takes longer than a run.
    lost, one = sweep([SPECS[1], SPECS[0]], tmp_path, die)
    assert not one.error
    assert "died" in lost.error
    assert one.measures == json.loads(json.dumps(finish(one.spec.config).measures))


@contextmanager
def interrupted(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Press Ctrl-C in a sweep as soon as its first run is saved."""

    def save(*arguments: Any) -> Result:
        result = SAVE(*arguments)
        signal.raise_signal(signal.SIGINT)
        return result

    patch.setattr(umbel.simulation.sweep, "_save", save)
    # What a shell starts in the background ignores interrupts, and so would this.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_sweep_that_is_stopped_goes_on(
    in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_figure_1", "_figure_2"):  # which take longer than the runs
        monkeypatch.setattr(umbel_lab.experiments.synthetic, name, lambda *_: None)
    monkeypatch.setattr("umbel.simulation.baselines.LOCAL_EPOCHS", 2)
    for setting, rounds in ((synthetic.PAPER, 4), (synthetic.LONG, 2)):
        monkeypatch.setitem(synthetic.SETTINGS, setting, {"rounds": rounds, "patience": 0, "restarts": 1})
    command = ["synthetic", "--quick", "--seeds", "1", "--out", str(tmp_path)]
    with monkeypatch.context() as patch, interrupted(patch):
        patch.setattr(umbel.simulation.sweep, "_each", EACH)
        stopped = CliRunner().invoke(app, [*command, "--workers", "1"])
    assert stopped.exit_code == 130, stopped.output
    assert str(tmp_path) in stopped.stderr
    assert not (tmp_path / "table.md").exists()
    [(result, time)] = ((path, path.stat().st_mtime_ns) for path in tmp_path.glob("runs/*/result.json"))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert len(in_process) == 11 - 1
    assert result.stat().st_mtime_ns == time
    # Two files of hypotheses and a trace for each run that trains together, and neither for the others.
    assert len([*tmp_path.glob("runs/*/*.npz"), *tmp_path.glob("runs/*/*.safetensors")]) == 5 * 3
    assert {"table.md", "table.csv"} <= {file.name for file in tmp_path.iterdir()}
