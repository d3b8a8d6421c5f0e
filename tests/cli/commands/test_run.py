"""`umbel run`: what it takes, what it refuses before anything starts, and what it says when it is stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from tests.deploy.processes import wait_until
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
    with pytest.raises(ConfigError, match=r"20260101-120000-synthetic is a run; to go on with it add --resume"):
        asked(["last"])


def test_a_run_to_start_from_is_found_from_where_the_user_is(
    umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (umbel_home / "runs" / "20260101-120000-synthetic", tmp_path / "mine"):
        folder.mkdir(parents=True)
        (folder / "config.toml").touch()
        assert asked([f"start-from={folder.name}"])["start-from"] == str(folder)
    with pytest.raises(ConfigError, match="start-from: there is no run 'nowhere'"):
        asked(["start-from=nowhere"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["ronds=3"], r"there is no ronds; did you mean rounds\?"),
        (["rounds=0"], "rounds must be a whole number of at least 1, got 0"),
        (["hosptal"], r"there is no configuration 'hosptal'.*did you mean hospital\?"),
        (["preferences"], "'preferences' is a dataset; run it as: umbel run dataset=preferences"),
        (["nothing-like-it"], "neither a file nor a name in configs/; configs/ has .*synthetic"),
        (["hospital", "qmnist"], "'qmnist' is not KEY=VALUE, and one configuration is given already"),
        (["--resume"], "name the run to go on with"),
        (["nowhere", "--resume"], "there is no run 'nowhere'.*list them with: umbel runs list"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, words: list[str], reason: str
) -> None:
    monkeypatch.setattr("umbel.simulation.launch.run", lambda *_, **__: pytest.fail("it was started"))
    code, told = umbel("run", *words)
    assert code == 1
    assert re.fullmatch(f"Error: .*{reason}.*\n", told)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["dataset=nowhere"], "no dataset 'nowhere'"),
        (["dataset="], "name a dataset to simulate"),
        (["clients-per-round=101"], "clients-per-round = 101, but dataset 'synthetic' has only 100"),
        (["validation-clients-per-round=101"], "has only 100; set validation-clients-per-round=100"),
        (["model=mlp"], "model 'mlp' does not take features of shape"),
        (["strategy=fedavgg"], "unknown strategy 'fedavgg'"),
        (["loss=cross-entropy"], "needs classes, whole numbers, as targets"),
    ],
)
def test_what_does_not_fit_together_is_told_while_the_superlink_starts(
    monkeypatch: pytest.MonkeyPatch, words: list[str], reason: str
) -> None:
    monkeypatch.setattr("umbel.simulation.launch.run", lambda *_, check, **__: check())
    code, told = umbel("run", *words)
    assert code == 1
    assert re.fullmatch(f"Error: .*{reason}.*\n", told)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["{run}", "--resume"], "resume: the run has done its 1 rounds; raise rounds to go on"),
        (["{run}", "--resume", "rounds=2", "seed=9"], "resume: seed was 0 and is 9; set it as it was"),
        (["resume={run}", "rounds=1", "restarts=1"], "resume: the run has done its 1 rounds; raise rounds to go on"),
        (["{run}", "--resume", "rounds=2"], "resume: .* is damaged: line 1 of history.jsonl is no round"),
    ],
)
def test_a_run_that_cannot_go_on_is_told_before_it_is_submitted(
    monkeypatch: pytest.MonkeyPatch, umbel_home: Path, words: list[str], reason: str
) -> None:
    folder = in_process.run({"rounds": 1, "restarts": 1})
    if "damaged" in reason:
        (folder / "history.jsonl").write_text("[]\n")
    monkeypatch.setattr("umbel.simulation.launch.run", lambda *_, check, **__: check())
    code, told = umbel("run", *(word.format(run=folder) for word in words))
    assert code == 1
    assert re.fullmatch(f"Error: {reason}.*\n", told)


def test_a_home_that_cannot_be_made_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr("umbel.simulation.launch.run", lambda *_, **__: pytest.fail("it was started"))
    code, told = umbel("run")
    assert code == 1
    assert re.fullmatch("Error: .*runs cannot be made: .*; set UMBEL_HOME to a folder of yours\n", told)


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
    command = [str(Path(sys.executable).parent / "umbel"), "run", "rounds=100000", "restarts=1"]
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
