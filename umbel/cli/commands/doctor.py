"""``umbel doctor``: check whether this machine has what umbel needs, with a fix for each problem."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from enum import StrEnum
from importlib import metadata

import psutil
import typer
from packaging.requirements import Requirement

from umbel.protocol import builds
from umbel.protocol.cli import command_line
from umbel.protocol.home import umbel_home
from umbel.protocol.project import described

GB = 10**9
PORTS = {8000: "umbel server start", 9094: "umbel site start", 39091: "flwr run"}
"""Ports of loopback that commands use by default."""
_ENOUGH_MEMORY, _LITTLE_MEMORY = 2 * GB, 0.5 * GB
_ENOUGH_DISK, _LITTLE_DISK = 2 * GB, 0.1 * GB


class State(StrEnum):
    """How a check ended."""

    GOOD = "ok"
    NOTE = "note"
    """Some commands will not work, or slowly."""
    BAD = "BAD"
    """umbel, or a library that it uses here, will not work."""


Finding = tuple[State, str]
"""The result of a check, with the fix."""


def findings() -> Iterator[Finding]:
    """Yield what is found on this machine."""
    yield State.GOOD, f"Python {platform.python_version()}, Flower {_version('flwr')}"
    if missing := [f"'{one}'" for one in unmet(described()["dependencies"])]:
        yield State.BAD, f"missing, or of another version: pip install {' '.join(missing)}"
    yield from _torch()
    ray, docker = _version("ray"), _said("docker", "version", "--format", "{{.Server.Version}}")
    fix = "Ray is missing, so flwr run fails: pip install 'flwr[simulation]'"
    yield (State.GOOD, f"Ray {ray}") if ray else (State.NOTE, fix)
    fix = "no Docker engine answers, which only containers need: start it, or see https://docs.docker.com"
    yield (State.GOOD, f"Docker {docker}") if docker else (State.NOTE, fix)
    memory = psutil.virtual_memory().available
    yield _amount(memory, _ENOUGH_MEMORY, _LITTLE_MEMORY, "of memory free", "end other programs")
    home = umbel_home()
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    fix = "make room, or set UMBEL_HOME to a folder on a larger disk"
    yield _amount(shutil.disk_usage(there).free, _ENOUGH_DISK, _LITTLE_DISK, f"of disk free under {home}", fix)
    if there.is_dir() and os.access(there, os.W_OK):
        yield State.GOOD, f"UMBEL_HOME {home}"
    else:
        yield State.BAD, f"UMBEL_HOME: {there} cannot be written to; set UMBEL_HOME to a folder of yours"
    for port in filter(_taken, PORTS):
        other = "it uses the SuperLink that listens there" if port == 39091 else "give it another with --port"
        yield State.NOTE, f"port {port} is in use, the default of {PORTS[port]}: {other}"


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # a broken library may raise anything
        yield State.BAD, f"PyTorch cannot be imported: {' '.join(str(error).split())}; pip install torch"
        return
    yield State.GOOD, f"PyTorch {torch.__version__}"
    if advice := builds.advice():
        yield State.BAD, advice
    names = ", ".join(_said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines())
    if torch.cuda.is_available():
        yield State.GOOD, f"GPU {names}"
    elif names:
        release, _, build = torch.__version__.partition("+")
        fix = f"pip install --force-reinstall torch=={release}" if build == "cpu" else "update the GPU's driver"
        yield State.NOTE, f"PyTorch does not use the GPU ({names}): {fix}"
    else:
        yield State.GOOD, "no NVIDIA GPU: runs use the CPU"


def _amount(free: int, enough: float, little: float, what: str, fix: str) -> Finding:
    told = f"{free / GB:.1f} GB {what}"
    if free >= enough:
        return State.GOOD, told
    return State.NOTE if free >= little else State.BAD, f"{told}, below the advised {enough / GB:.0f} GB: {fix}"


def unmet(requirements: Sequence[str]) -> Iterator[str]:
    """Yield the requirements that the environment does not meet, without those of extras."""
    for text in requirements:
        one = Requirement(text)
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            found = _version(one.name)
            if not found or not one.specifier.contains(found, prereleases=True):
                yield str(one).partition(";")[0].strip()


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


@command_line
def app() -> None:
    """Check Python, PyTorch, Flower, Ray, Docker, GPU, memory, disk and ports. Exit code 1 if umbel will not work."""
    found = list(findings())
    for state, text in found:
        typer.echo(f"{state:<4}  {text}")
    if any(state is State.BAD for state, _ in found):
        raise typer.Exit(1)
