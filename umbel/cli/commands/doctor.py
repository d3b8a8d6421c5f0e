"""``umbel doctor``: check whether this machine has what umbel needs, with a fix for each problem."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import psutil
import typer
from packaging.requirements import Requirement

from umbel.protocol import builds
from umbel.protocol.cli import errors_in_one_line
from umbel.protocol.home import umbel_home
from umbel.protocol.project import described

app = typer.Typer(add_completion=False)

GB = 10**9
PORTS = {8000: "umbel server start", 9094: "umbel site start", 39091: "flwr run"}
"""Ports of loopback that commands use by default."""
_ENOUGH_MEMORY, _LITTLE_MEMORY = 2 * GB, 0.5 * GB
_ENOUGH_DISK, _LITTLE_DISK = 2 * GB, 0.1 * GB
_PYTHONS = (3, 11), (3, 13)


class State(StrEnum):
    """How a check ended."""

    GOOD = "ok"
    NOTE = "note"
    """Some commands will not work, or slowly."""
    BAD = "BAD"
    """umbel, or a library that it uses here, will not work."""


@dataclass(frozen=True)
class Finding:
    """The result of a check, with the fix."""

    state: State
    text: str

    def __str__(self) -> str:
        return f"{self.state:<4}  {self.text}"


@dataclass(frozen=True)
class Machine:
    """The facts that the checks use."""

    python: tuple[int, int]
    unmet: Sequence[str]
    """Requirements of umbel that are missing or have another version."""
    torch: str
    """PyTorch's version with its build; empty where it cannot be imported."""
    torch_fault: str
    advice: str
    """How to fix builds of PyTorch and torchvision that do not fit each other; empty if they do."""
    cuda: bool
    """Whether PyTorch finds a GPU."""
    gpus: Sequence[str]
    """Names of NVIDIA's GPUs, by their driver."""
    flower: str
    ray: str
    docker: str
    """Version of Docker's engine; empty if none answers."""
    memory: int
    """Bytes of free memory."""
    disk: int
    """Bytes of free disk for data and runs."""
    home: Path
    home_fault: str
    taken: Sequence[int]
    """Those of `PORTS` that are in use."""

    @classmethod
    def here(cls) -> Machine:
        """Return the facts about this machine."""
        home = umbel_home()
        torch, cuda, fault = _torch()
        there = next(folder for folder in (home, *home.parents) if folder.exists())
        return cls(
            python=sys.version_info[:2],
            unmet=tuple(unmet(described()["dependencies"])),
            torch=torch,
            torch_fault=fault,
            advice=builds.advice(),
            cuda=cuda,
            gpus=tuple(_said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()),
            flower=_version("flwr"),
            ray=_version("ray"),
            docker=_said("docker", "version", "--format", "{{.Server.Version}}"),
            memory=psutil.virtual_memory().available,
            disk=shutil.disk_usage(there).free,
            home=home,
            home_fault="" if there.is_dir() and os.access(there, os.W_OK) else f"{there} cannot be written to",
            taken=tuple(port for port in PORTS if _taken(port)),
        )


def findings(machine: Machine) -> Iterator[Finding]:
    """Yield the findings about a machine."""
    (low, high), version = _PYTHONS, machine.python
    told = f"Python {version[0]}.{version[1]}"
    if low <= version <= high:
        yield Finding(State.GOOD, told)
    else:
        yield Finding(
            State.BAD, f"{told}: umbel needs 3.{low[1]} to 3.{high[1]}; make an environment with one of these versions"
        )
    if machine.unmet:
        wanted = " ".join(f"'{one}'" for one in machine.unmet)
        yield Finding(State.BAD, f"missing, or of another version: pip install {wanted}")
    yield from _of_torch(machine)
    yield (
        Finding(State.GOOD, f"Flower {machine.flower}")
        if machine.flower
        else Finding(State.BAD, "Flower is missing: pip install 'flwr[simulation]'")
    )
    yield (
        Finding(State.GOOD, f"Ray {machine.ray}")
        if machine.ray
        else Finding(State.NOTE, "Ray is missing, so flwr run fails: pip install 'flwr[simulation]'")
    )
    yield (
        Finding(State.GOOD, f"Docker {machine.docker}")
        if machine.docker
        else Finding(
            State.NOTE, "no Docker engine answers, which only containers need: start it, or see https://docs.docker.com"
        )
    )
    yield _amount(machine.memory, _ENOUGH_MEMORY, _LITTLE_MEMORY, "of memory free", "end other programs")
    where, fix = f"of disk free under {machine.home}", "make room, or set UMBEL_HOME to a folder on a larger disk"
    yield _amount(machine.disk, _ENOUGH_DISK, _LITTLE_DISK, where, fix)
    if machine.home_fault:
        yield Finding(State.BAD, f"UMBEL_HOME: {machine.home_fault}; set UMBEL_HOME to a folder of yours")
    else:
        yield Finding(State.GOOD, f"UMBEL_HOME {machine.home}")
    for port in machine.taken:
        other = "it uses the SuperLink that listens there" if port == 39091 else "give it another with --port"
        yield Finding(State.NOTE, f"port {port} is in use, the default of {PORTS[port]}: {other}")
    if not machine.taken:
        yield Finding(State.GOOD, f"ports {', '.join(map(str, PORTS))} are free")


def _of_torch(machine: Machine) -> Iterator[Finding]:
    if not machine.torch:
        yield Finding(State.BAD, f"PyTorch cannot be imported: {machine.torch_fault}; pip install torch")
        return
    yield Finding(State.GOOD, f"PyTorch {machine.torch}")
    if machine.advice:
        yield Finding(State.BAD, machine.advice)
    names = ", ".join(machine.gpus)
    if machine.cuda:
        yield Finding(State.GOOD, f"GPU {names}" if names else "GPU")
    elif names:
        release, _, build = machine.torch.partition("+")
        fix = f"pip install --force-reinstall torch=={release}" if build == "cpu" else "update the GPU's driver"
        yield Finding(State.NOTE, f"PyTorch {machine.torch} does not use the GPU ({names}): {fix}")
    else:
        yield Finding(State.GOOD, "no NVIDIA GPU: runs use the CPU")


def _amount(free: int, enough: float, little: float, what: str, fix: str) -> Finding:
    told = f"{free / GB:.1f} GB {what}"
    if free >= enough:
        return Finding(State.GOOD, told)
    return Finding(
        State.NOTE if free >= little else State.BAD, f"{told}, below the advised {enough / GB:.0f} GB: {fix}"
    )


def unmet(requirements: Sequence[str]) -> Iterator[str]:
    """Yield the requirements that the environment does not meet, without those of extras."""
    for text in requirements:
        one = Requirement(text)
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            found = _version(one.name)
            if not found or not one.specifier.contains(found, prereleases=True):
                yield str(one).partition(";")[0].strip()


def _torch() -> tuple[str, bool, str]:
    """Return PyTorch's version, whether it finds a GPU, and why it cannot be imported."""
    try:
        import torch

        return torch.__version__, torch.cuda.is_available(), ""
    except Exception as error:  # a broken library may raise anything
        return "", False, " ".join(str(error).split())


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _said(*command: str) -> str:
    """Return the output of a program; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _taken(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(1)
        return sock.connect_ex(("127.0.0.1", port)) == 0


@app.command()
def command() -> None:
    """Check Python, PyTorch, Flower, Ray, Docker, GPU, memory, disk and ports. Exit code 1 if umbel will not work."""
    with errors_in_one_line():
        found = list(findings(Machine.here()))
    for finding in found:
        typer.echo(finding)
    if any(finding.state is State.BAD for finding in found):
        raise typer.Exit(1)
