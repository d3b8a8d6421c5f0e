"""``umbel doctor`` says what is missing and what to do, of machines that are made up and of this one."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.helpers.errors import ended
from umbel.cli.commands import doctor
from umbel.cli.commands.doctor import GB, Machine, State, app, findings, unmet
from umbel.protocol import builds

SOUND = Machine(
    python=(3, 12), unmet=(), torch="2.13.0+cpu", torch_fault="", advice="", cuda=False, gpus=(), flower="1.42.0",
    ray="2.55.1", docker="28.2.2", memory=8 * GB, disk=50 * GB, home=Path("/home/rose/umbel"), home_fault="", taken=(),
)  # fmt: skip
ADVICE = "pip install --force-reinstall --no-deps torchvision==0.28.0 --index-url https://download.pytorch.org/whl/cpu"


def test_a_sound_machine_gets_no_advice() -> None:
    found = list(findings(SOUND))
    assert {one.state for one in found} == {State.GOOD}
    assert len(found) == 10


@pytest.mark.parametrize(
    ("changes", "state", "told", "fix"),
    [
        ({"python": (3, 10)}, State.BAD, "Python 3.10", "3.11 to 3.13"),
        ({"python": (3, 14)}, State.BAD, "Python 3.14", "3.11 to 3.13"),
        ({"unmet": ("numpy>=2.0",)}, State.BAD, "missing", "pip install 'numpy>=2.0'"),
        ({"torch": "", "torch_fault": "libc is old"}, State.BAD, "libc is old", "pip install torch"),
        ({"advice": ADVICE}, State.BAD, "torchvision", ADVICE),
        ({"gpus": ("H100",)}, State.NOTE, "H100", "pip install --force-reinstall torch==2.13.0"),
        ({"gpus": ("H100",), "torch": "2.13.0+cu130"}, State.NOTE, "H100", "driver"),
        ({"flower": ""}, State.BAD, "Flower", "pip install 'flwr[simulation]'"),
        ({"ray": ""}, State.NOTE, "Ray", "pip install 'flwr[simulation]'"),
        ({"docker": ""}, State.NOTE, "Docker", "start it"),
        ({"memory": GB}, State.NOTE, "1.0 GB of memory", "the advised 2 GB"),
        ({"memory": GB // 10}, State.BAD, "0.1 GB of memory", "end other programs"),
        ({"disk": GB}, State.NOTE, "1.0 GB of disk", "UMBEL_HOME"),
        ({"disk": 0}, State.BAD, "0.0 GB of disk", "make room"),
        ({"home_fault": "/data cannot be written to"}, State.BAD, "/data", "set UMBEL_HOME"),
        ({"taken": (8000,)}, State.NOTE, "port 8000", "--port"),
        ({"taken": (39091,)}, State.NOTE, "port 39091", "SuperLink"),
    ],
)
def test_each_fault_is_told_with_its_remedy(changes: dict[str, Any], state: State, told: str, fix: str) -> None:
    (worst,) = [one for one in findings(replace(SOUND, **changes)) if one.state is not State.GOOD]
    assert worst.state is state
    assert told in worst.text
    assert fix in worst.text


def test_a_gpu_that_pytorch_finds_is_named() -> None:
    told = [one.text for one in findings(replace(SOUND, cuda=True, gpus=("H100",), torch="2.13.0+cu130"))]
    assert "GPU H100" in told


def test_the_exit_code_is_1_for_a_bad_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, code in ({}, 0), ({"docker": ""}, 0), ({"advice": ADVICE}, 1):
        monkeypatch.setattr(Machine, "here", classmethod(lambda _, changes=changes: replace(SOUND, **changes)))
        done = CliRunner().invoke(app)
        assert (done.exit_code, "BAD" in done.output) == (code, bool(code))


def test_this_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs answer as they are faked; a port on which something listens is taken."""
    answers = {"nvidia-smi": "H100\nH200\n", "docker": "28.2.2\n"}

    def said(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, answers[command[0]])

    monkeypatch.setattr(subprocess, "run", said)
    monkeypatch.setattr(builds, "advice", lambda: ADVICE)
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path / "not" / "there"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {port: "a test"})
        here = Machine.here()
    assert here.taken == (port,)
    assert (here.python, here.gpus, here.docker, here.advice) == (
        sys.version_info[:2],
        ("H100", "H200"),
        "28.2.2",
        ADVICE,
    )
    assert here.home == tmp_path / "not" / "there"
    assert (here.home_fault, here.unmet, here.torch_fault) == ("", (), "")
    assert min(here.memory, here.disk) > 0


def test_programs_that_are_missing_fail_or_hang_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(command: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 20)

    assert doctor._said("there-is-no-such-program") == ""
    assert doctor._said(sys.executable, "-c", "import sys; print('x'); sys.exit(1)") == ""
    monkeypatch.setattr(subprocess, "run", hangs)
    assert doctor._said("docker") == ""


def test_requirements_are_compared_with_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"numpy": "1.9", "flwr": "1.42.0"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, ""))
    wanted = [
        "numpy>=2.0",
        "flwr[simulation]<1.43,>=1.42.0",
        "gone",
        "onnx; extra == 'export'",
        "old; python_version < '3'",
    ]
    assert list(unmet(wanted)) == ["numpy>=2.0", "gone"]


def test_a_home_that_is_no_absolute_path_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_HOME", "umbel")
    done = CliRunner().invoke(app)
    ended(done.exit_code, done.stderr, "config.home", "umbel")
