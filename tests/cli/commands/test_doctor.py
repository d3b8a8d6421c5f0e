"""``umbel doctor`` says what is missing and what to do, of machines that are made up and of this one."""

from __future__ import annotations

import builtins
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.helpers.cli import refused, umbel
from umbel.cli.commands import doctor
from umbel.cli.commands.doctor import GB, State, findings, unmet
from umbel.protocol import builds

ADVICE = "pip install --force-reinstall --no-deps torchvision==0.28.0 --index-url https://download.pytorch.org/whl/cpu"
Patch = pytest.MonkeyPatch
Free = namedtuple("Free", "available free", defaults=(8 * GB, 50 * GB))


def programs(patch: Patch, **answers: str) -> None:
    told = {"nvidia-smi": answers.get("gpu", ""), "docker": answers.get("docker", "28.2.2")}
    patch.setattr(doctor, "_said", lambda name, *_: told[name])


@pytest.fixture(autouse=True)
def sound(monkeypatch: Patch, tmp_path: Path) -> None:
    """Make this a machine without a fault."""
    programs(monkeypatch)
    monkeypatch.setattr(psutil, "virtual_memory", Free)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Free())
    monkeypatch.setattr(doctor, "_taken", lambda _: False)
    monkeypatch.setattr(builds, "advice", lambda: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(doctor, "_version", lambda name: "9999" if name == "ray" else doctor.metadata.version(name))
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path / "not" / "there"))


def faults() -> list[tuple[State, str]]:
    return [one for one in findings() if one[0] is not State.GOOD]


def test_a_sound_machine_gets_no_advice(tmp_path: Path, monkeypatch: Patch) -> None:
    of_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert faults() == []
    home = tmp_path / "not" / "there"
    assert {"Docker 28.2.2", "8.0 GB of memory free", "GPU H100", f"UMBEL_HOME {home}"} <= {
        text for _, text in findings()
    }
    assert not home.parent.exists()


def set_to(target: Any, name: str, value: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(target, name, value)


def without_torch(patch: Patch) -> None:
    found = builtins.__import__

    def refuses(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise ImportError("libc is old")
        return found(name, *rest)

    patch.setattr(builtins, "__import__", refuses)


def of_cuda(patch: Patch) -> None:
    programs(patch, gpu="H100")
    patch.setattr(torch, "__version__", "2.13.0+cu130")


@pytest.mark.parametrize(
    ("change", "state", "told", "fix"),
    [
        (set_to(doctor, "unmet", lambda _: ["numpy>=2.0"]), State.BAD, "missing", "pip install 'numpy>=2.0'"),
        (without_torch, State.BAD, "libc is old", "pip install torch"),
        (set_to(builds, "advice", lambda: ADVICE), State.BAD, "torchvision", ADVICE),
        (lambda patch: programs(patch, gpu="H100"), State.NOTE, "H100", "--force-reinstall torch==2.13.0"),
        (of_cuda, State.NOTE, "H100", "driver"),
        (set_to(doctor, "_version", lambda _: ""), State.NOTE, "Ray", "pip install 'flwr[simulation]'"),
        (lambda patch: programs(patch, docker=""), State.NOTE, "Docker", "start it"),
        (set_to(psutil, "virtual_memory", lambda: Free(GB)), State.NOTE, "1.0 GB of memory", "the advised 2 GB"),
        (set_to(psutil, "virtual_memory", lambda: Free(GB // 10)), State.BAD, "0.1 GB of memory", "end other programs"),
        (set_to(doctor.shutil, "disk_usage", lambda _: Free(free=GB)), State.NOTE, "1.0 GB of disk", "UMBEL_HOME"),
        (set_to(doctor.shutil, "disk_usage", lambda _: Free(free=0)), State.BAD, "0.0 GB of disk", "make room"),
        (set_to(doctor.os, "access", lambda *_: False), State.BAD, "cannot be written to", "set UMBEL_HOME"),
        (set_to(doctor, "_taken", lambda port: port == 8000), State.NOTE, "port 8000", "--port"),
        (set_to(doctor, "_taken", lambda port: port == 39091), State.NOTE, "port 39091", "SuperLink"),
    ],
)
def test_each_fault_is_told_with_its_remedy(
    monkeypatch: Patch, change: Callable[[Patch], None], state: State, told: str, fix: str
) -> None:
    change(monkeypatch)
    worst, text = next(one for one in faults() if told in one[1])
    assert worst is state
    assert fix in text


def test_the_exit_code_is_1_for_a_bad_machine_alone(monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        for state in State:
            patch.setattr(doctor, "findings", lambda state=state: [(state, "x")])
            assert umbel("doctor")[0] == (state is State.BAD)
    monkeypatch.setenv("UMBEL_HOME", "umbel")
    refused("config.home", "doctor")


def test_a_port_on_which_something_listens_is_taken(monkeypatch: Patch) -> None:
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert doctor._taken(port)
    assert not doctor._taken(port)


def test_programs_that_are_missing_fail_or_hang_say_nothing(monkeypatch: Patch) -> None:
    monkeypatch.undo()

    def hangs(command: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 20)

    assert doctor._said(sys.executable, "-c", "print('x')") == "x"
    assert doctor._said("there-is-no-such-program") == ""
    assert doctor._said(sys.executable, "-c", "import sys; print('x'); sys.exit(1)") == ""
    monkeypatch.setattr(subprocess, "run", hangs)
    assert doctor._said("docker") == ""


def test_requirements_are_compared_with_what_is_installed(monkeypatch: Patch) -> None:
    versions = {"numpy": "1.9", "flwr": "1.42.0"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, ""))
    others = ["flwr[simulation]<1.43,>=1.42.0", "onnx; extra == 'export'", "old; python_version < '3'"]
    assert list(unmet(["numpy>=2.0", "gone", *others])) == ["numpy>=2.0", "gone"]
