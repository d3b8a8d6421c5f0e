"""A Ray cluster: the one that ``RAY_ADDRESS`` names is joined, and this code shipped to it.

What runs on its machines imports this module first, where nothing may be installed yet that umbel needs.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from umbel.protocol.errors import ClusterError
from umbel.protocol.project import APP

PACKAGES = ("umbel", "ray", "flwr", "torch", "numpy", "safetensors")
"""What must be the same on all machines, besides Python."""

_LISTEN_S = 5.0
_ANSWER_S = 30.0  # a busy machine takes long over it
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # of gRPC, and no settings
_START_S = 300.0  # a machine's first process unpacks the code, and a busy one takes long over it


@dataclass(frozen=True)
class Machine:
    """A machine of a cluster, which Ray calls a node.

    Attributes
    ----------
    id : str
        Ray's own; a machine that comes back has another.
    name : str
        Its address.
    cpus : float
    gpus : int
    """

    id: str
    name: str
    cpus: float
    gpus: int


def address() -> str:
    """Return the cluster that ``RAY_ADDRESS`` names; empty for none, or "local", which is none."""
    named = os.environ.get("RAY_ADDRESS", "")
    return "" if named == "local" else named


def probe() -> None:
    """Raise `ClusterError` where nothing listens at ``HOST:PORT``, or something other than Ray does.

    Ray would try for minutes, without a word.
    """
    named = address()
    host, _, port = named.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        with socket.create_connection((host, int(port)), timeout=_LISTEN_S) as line:
            if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
                return
            line.settimeout(_ANSWER_S)
            line.sendall(_HELLO)
            answer = line.recv(4)
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"RAY_ADDRESS={named}: {error}; start the cluster, or unset RAY_ADDRESS", code="cluster.unreachable"
        ) from None
    if answer[3:] != b"\x04":  # the settings, with which gRPC begins
        raise ClusterError(
            f"RAY_ADDRESS={named}: what listens there is not Ray; give the port of ray start --head --port=PORT, or "
            "unset RAY_ADDRESS",
            code="cluster.not-ray",
        )


@contextmanager
def joined(environment: Mapping[str, str] | None = None, modules: Sequence[Path] = ()) -> Iterator[None]:
    """Join the cluster that ``RAY_ADDRESS`` names, and leave it at the end: all that was started there ends, too.

    Parameters
    ----------
    environment : mapping, optional
        Variables of the processes there, over those with which Ray was started.
    modules : sequence of Path
        Modules and packages of the user's own that go along.

    Raises
    ------
    ClusterError
        When it is not there, or a machine of it has other versions of what is needed than this one.
    """
    named = address()
    probe()
    quiet()
    from umbel.simulation.launch import unpacked  # here: a machine's first import may lack what this takes

    with tempfile.TemporaryDirectory(prefix="umbel-code-") as scratch:
        code: dict[str, Any] = {"working_dir": str(unpacked(APP, Path(scratch)))}
        code |= {"py_modules": [str(path) for path in modules]} if modules else {}
        shared = {**code, "env_vars": dict(environment or {})}
        try:
            ray.init(runtime_env=shared, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:  # ConnectionError, RuntimeError, ValueError: Ray raises what it likes
            raise ClusterError(_told(named, error), code="cluster.not-joined") from None
    try:
        check_versions({machine.name: found for machine, found in on_each(machines(), versions)})
        yield
    finally:
        ray.shutdown()


def quiet() -> None:
    """Keep Ray from warning that one of its defaults will change."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def machines() -> list[Machine]:
    """Return the living machines of the cluster on which something may run, in the order of their names."""
    found = []
    for node in ray.nodes():
        there = node["Resources"]
        if node["Alive"] and there.get("CPU", 0) > 0:
            found.append(Machine(node["NodeID"], node["NodeManagerAddress"], there["CPU"], int(there.get("GPU", 0))))
    return sorted(found, key=lambda machine: (machine.name, machine.id))


def on_each(
    there: Sequence[Machine], task: Callable[..., Any], *arguments: Any, may_die: bool = False
) -> list[tuple[Machine, Any]]:
    """Call a function on each machine, all at once; return what it returned, by machine.

    Parameters
    ----------
    there : sequence of Machine
    task : callable
    *arguments
    may_die : bool
        Whether a machine that does not answer is left out.

    Raises
    ------
    ClusterError
        When a machine does not answer.
    """
    asked = {}
    for machine in there:
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": here(machine)}
        asked[machine] = ray.remote(**options)(task).remote(*arguments)
    found = []
    for machine, answer in asked.items():
        try:
            found.append((machine, ray.get(answer, timeout=_START_S)))
        except ray.exceptions.RayError as error:
            if not may_die:
                raise ClusterError(
                    f"machine {machine.name} of the Ray cluster cannot be used: {last_line(error)}; install there what "
                    "is installed here, or take it out of the cluster",
                    code="cluster.machine",
                ) from None
    return found


def here(machine: Machine) -> Any:
    """Return Ray's strategy that places a task or an actor on a machine, and nowhere else."""
    return NodeAffinitySchedulingStrategy(machine.id, soft=False)


def versions() -> dict[str, str]:
    """Return the versions of what must be the same on all machines; empty for what is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def check_versions(there: Mapping[str, Mapping[str, str]]) -> None:
    """Raise `ClusterError` where a machine has other versions than this one; builds of a version may differ.

    Parameters
    ----------
    there : mapping from str to mapping
        By a machine's name its `versions`.
    """
    own = versions()
    for name, found in there.items():
        for package, ours in own.items():
            theirs = found[package]
            if _release(theirs) == _release(ours):
                continue
            fix = f"run Python {ours}" if package == "python" else f"pip install '{package}=={_release(ours)}'"
            if package == "umbel":
                fix = "install the umbel that is here"
            raise ClusterError(
                f"machine {name} of the Ray cluster has {f'{package} {theirs}' if theirs else f'no {package}'}, and "
                f"this one {package} {ours}; there: {fix}, and start its Ray again",
                code="cluster.versions",
            )


def last_line(error: BaseException) -> str:
    """Return the end of an error of Ray's, which holds the traceback of what went wrong elsewhere."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _release(version: str) -> str:
    """Return a version without what says how it was built: a machine with a GPU has another PyTorch of that version."""
    return version.partition("+")[0]


def _told(named: str, error: Exception) -> str:
    """Return why a cluster cannot be joined, in a line."""
    text = " ".join(str(error).split())
    if "Version mismatch" in text:
        return f"RAY_ADDRESS={named}: {text} Start Ray on all machines from the Python environment that is used here"
    fix = "start Ray on this machine too (ray start --address=HOST:PORT), or unset RAY_ADDRESS"
    return f"RAY_ADDRESS={named}: the cluster cannot be joined: {text}; {fix}"
