"""`umbel run`: what it takes, what it refuses before anything starts, and what it says when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from tests.deploy.processes import wait_until
from tests.helpers.errors import ended, raises
from tests.simulation.test_superlink import heeds_interrupts
from umbel.cli.commands.run import asked
from umbel.cli.main import app
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig
from umbel.simulation import in_process


def umbel(*words: str) -> tuple[int, str]:
    told = CliRunner().invoke(app, list(words), prog_name="umbel")
    return told.exit_code, told.output


def test_values_come_from_a_file_and_from_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text('rounds = 3\nstrategy = "ifca"\n')
    values = {"rounds": 7, "strategy": "fedavg", "clip-norm-floor": 0.5}
    words = ["rounds=7", "strategy=fedavg", "clip-norm-floor=0.5"]
    assert asked([str(config), *words]) == asked(words, config) == values


@pytest.mark.parametrize(("text", "number"), [(".5", 0.5), ("5.", 5.0), ("+.5", 0.5), (".5e-1", 0.05)])
def test_a_number_may_be_short(text: str, number: float) -> None:
    assert asked([f"step-size={text}"]) == {"step-size": number}


def test_a_configuration_goes_by_its_name() -> None:
    assert asked(["hospital", "rounds=2"])["dataset"] == "hospital"


def test_a_run_goes_on_with_all_that_it_was_asked(umbel_home: Path) -> None:
    folder = umbel_home / "runs" / "20260101-120000-synthetic"
    folder.mkdir(parents=True)
    was = RunConfig().entries() | {"seed": 7, "hypotheses": 3}
    (folder / "config.toml").write_text(tomli_w.dumps({"config": was, "versions": {}}))
    for name in (folder.name, "20260101", "last", str(folder)):
        values = asked([name, "rounds=200"], resume=True)
        assert values == was | {"rounds": 200, "resume": str(folder)}
    with raises(ConfigError, "config.is-a-run", "20260101-120000-synthetic", "--resume"):
        asked(["last"])


def test_a_run_to_start_from_is_found_from_where_the_user_is(
    umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (umbel_home / "runs" / "20260101-120000-synthetic", tmp_path / "mine"):
        folder.mkdir(parents=True)
        (folder / "config.toml").touch()
        assert asked([f"start-from={folder.name}"])["start-from"] == str(folder)
    with raises(ConfigError, "config.no-run", "start-from", "'nowhere'"):
        asked(["start-from=nowhere"])


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["ronds=3"], "config", "did you mean rounds?"),
        (["rounds=0"], "config", "rounds"),
        (["hosptal"], "config.unknown-configuration", "did you mean hospital?"),
        (["preferences"], "config.is-a-dataset", "umbel run dataset=preferences"),
        (["nothing-like-it"], "config.unknown-configuration", "synthetic"),
        (["hospital", "qmnist"], "config.two-configurations", "'qmnist'"),
        (["--resume"], "config.no-run", "umbel run RUN --resume"),
        (["nowhere", "--resume"], "config.no-run", "'nowhere'"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, words: list[str], code: str, part: str
) -> None:
    monkeypatch.setattr("umbel.simulation.launch.run", lambda *_, **__: pytest.fail("it was started"))
    ended(*umbel("run", *words), code, part)


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["dataset=nowhere"], "data", "'nowhere'"),
        (["dataset="], "config.no-dataset", "dataset"),
        (["clients-per-round=101"], "config.too-few-clients", "clients-per-round=100"),
        (["validation-clients-per-round=101"], "config.too-few-clients", "validation-clients-per-round=100"),
        (["model=mlp"], "model", "'mlp'"),
        (["strategy=fedavgg"], "config", "'fedavgg'"),
        (["loss=cross-entropy"], "model", "classes"),
    ],
)
def test_what_does_not_fit_together_is_told_while_the_superlink_starts(
    monkeypatch: pytest.MonkeyPatch, words: list[str], code: str, part: str
) -> None:
    monkeypatch.setattr("umbel.simulation.launch.run", lambda *_, check, **__: check())
    ended(*umbel("run", *words), code, part)


@pytest.mark.parametrize(
    ("words", "history", "part"),
    [
        (["{run}", "--resume"], "", "1 rounds"),
        (["{run}", "--resume", "rounds=2", "seed=9"], "", "seed"),
        (["resume={run}", "rounds=1", "restarts=1"], "", "1 rounds"),
        (["{run}", "--resume", "rounds=2"], "[]\n", "line 1 of history.jsonl"),
    ],
)
def test_a_run_that_cannot_go_on_is_told_before_it_is_submitted(
    monkeypatch: pytest.MonkeyPatch, umbel_home: Path, words: list[str], history: str, part: str
) -> None:
    folder = in_process.run({"rounds": 1, "restarts": 1})
    if history:
        (folder / "history.jsonl").write_text(history)
    monkeypatch.setattr("umbel.simulation.launch.run", lambda *_, check, **__: check())
    ended(*umbel("run", *(word.format(run=folder) for word in words)), "config", "resume", part)


def test_a_home_that_cannot_be_made_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr("umbel.simulation.launch.run", lambda *_, **__: pytest.fail("it was started"))
    ended(*umbel("run"), "config.home", "UMBEL_HOME")


OWN = """
import torch


def model():
    from beside import width
    return torch.nn.Linear(2, width, bias=False)
"""


def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"UMBEL_HOME": str(tmp_path / "umbel-home"), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_a_run_of_a_users_own_model_is_stopped_and_says_at_once_how_to_go_on(tmp_path: Path) -> None:
    """The model lies where the user is, in a folder with names that umbel's own packages have."""
    work = tmp_path / "work"
    (work / "client").mkdir(parents=True)
    (work / "client" / "__init__.py").write_text("raise ImportError('the user has a client, too')")
    (work / "mine.py").write_text(OWN)
    (work / "beside.py").write_text("width = 1")
    command = [str(Path(sys.executable).parent / "umbel"), "run", "rounds=100000", "restarts=1", "--nodes=1"]
    launcher = subprocess.Popen(
        [*command, "model=mine:model", "loss=mse"],
        cwd=work, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=heeds_interrupts,
    )  # fmt: skip
    assert launcher.stdout is not None
    lines: list[str] = []
    for line in launcher.stdout:
        lines.append(line.rstrip())
        if line.startswith("Results go to "):
            folder = Path(lines[-1].removeprefix("Results go to "))
            wait_until("first round", lambda saved=folder / "latest.safetensors": saved.exists() or None, 1200)
            launcher.send_signal(signal.SIGINT)
            break
    lines += [line.rstrip() for line in launcher.stdout]
    assert launcher.wait() == 130, lines
    (run,) = (tmp_path / "umbel-home" / "runs").iterdir()
    assert lines[-2:] == [
        f"Stopped. The finished rounds are kept in {run}",
        f"Go on with: umbel run {run.name} --resume",
    ]
    assert (run / "latest.safetensors").exists()
    assert not any("Warning" in line for line in lines)
