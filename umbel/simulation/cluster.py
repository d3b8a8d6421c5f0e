"""A Ray cluster: join the one that ``RAY_ADDRESS`` names, and ship this code to it.

Its machines import this module first, before umbel's dependencies may be installed there.
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
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from umbel.protocol.errors import ClusterError
from umbel.protocol.project import APP

_TOKEN = "start Ray everywhere, and this run, with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN (docs/guides/cluster.md)"
PACKAGES = ("umbel", "ray", "flwr", "torch", "numpy", "safetensors")  # these, and Python, are the same on all machines

_LISTEN_S = 5.0
_ANSWER_S = 30.0  # a busy machine answers slowly
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # of gRPC, and no settings
_START_S = 300.0  # a machine's first process unpacks the code, which takes long on a busy machine


@dataclass(frozen=True)
class Machine:
    """A machine of a cluster, which Ray calls a node."""

    id: str  # Ray's; a machine that returns has another
    name: str  # its address
    cpus: float
    gpus: int


def address() -> str:
    """Return the cluster that ``RAY_ADDRESS`` names; empty for none, or for "local", which also means none."""
    named = os.environ.get("RAY_ADDRESS", "")
    return "" if named == "local" else named


def probe() -> None:
    """Raise `ClusterError` if nothing listens at ``HOST:PORT``, or something other than Ray.

    Ray itself would try for minutes without a message.
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
        text = f"RAY_ADDRESS={named}: {error}; start the cluster, or unset RAY_ADDRESS"
        raise ClusterError(text, code="cluster.unreachable") from None
    if answer[3:] != b"\x04":  # the settings frame, with which gRPC begins
        text = f"RAY_ADDRESS={named} is not Ray's; give the port of ray start --head --port=PORT, or unset RAY_ADDRESS"
        raise ClusterError(text, code="cluster.not-ray")


@contextmanager
def joined(environment: Mapping[str, str] | None = None, modules: Sequence[Path] = ()) -> Iterator[None]:
    """Join the cluster that ``RAY_ADDRESS`` names, and leave it at the end, which ends everything started there.

    Processes there have the variables in `environment` in addition to Ray's, and the user's `modules`. Raises
    `ClusterError` if there is no cluster, or a machine of it has other versions than this one.
    """
    named = address()
    probe()
    quiet()
    from umbel.simulation.launch import unpacked  # here, since a machine's first import may lack its dependencies

    with tempfile.TemporaryDirectory(prefix="umbel-code-") as scratch:
        shared: dict[str, Any] = {"working_dir": str(unpacked(APP, Path(scratch)))}
        shared |= {"py_modules": [str(path) for path in modules]} if modules else {}
        shared["env_vars"] = dict(environment or {})
        if os.environ.get("RAY_AUTH_MODE") != "token":
            from umbel.protocol.flower import log

            log(
                logging.WARNING,
                "Everyone who reaches this Ray cluster can run code on its machines: %s",
                _TOKEN,
            )
        try:
            ray.init(runtime_env=shared, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:  # Ray raises many kinds: ConnectionError, RuntimeError, ValueError
            raise ClusterError(_told(named, error), code="cluster.not-joined") from None
    try:
        check_versions({machine.name: found for machine, found in on_each(machines(), versions)})
        yield
    finally:
        ray.shutdown()


@contextmanager
def private() -> Iterator[None]:
    """Make the Ray that this process starts listen only on loopback, ask for a token, and keep its files private.

    Ray reads its environment on import, which may have happened earlier.
    """
    from ray._private import ray_constants

    from umbel.simulation.superlink import private_ray

    def read() -> None:
        parts = import_module("ray._raylet")
        parts.AuthenticationTokenLoader.instance().reset_cache()
        parts.Config.initialize("")

    settings, several = private_ray(), ray_constants.ENABLE_RAY_CLUSTER
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    ray_constants.ENABLE_RAY_CLUSTER = False
    read()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        read()


def quiet() -> None:
    """Keep Ray from warning that one of its defaults will change."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def machines() -> list[Machine]:
    """Return the living machines of the cluster that can run tasks, sorted by name."""
    found = []
    for node in ray.nodes():
        there = node["Resources"]
        if node["Alive"] and there.get("CPU", 0) > 0:
            found.append(Machine(node["NodeID"], node["NodeManagerAddress"], there["CPU"], int(there.get("GPU", 0))))
    return sorted(found, key=lambda machine: (machine.name, machine.id))


def on_each(
    there: Sequence[Machine], task: Callable[..., Any], *arguments: Any, may_die: bool = False
) -> list[tuple[Machine, Any]]:
    """Call a function on all machines at once; return each machine's result.

    Raises `ClusterError` if a machine does not answer, unless it `may_die`: then it is left out.
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
                    f"machine {machine.name} of the Ray cluster cannot be used: {last_line(error)}; install the same "
                    "packages there as here, or remove it from the cluster",
                    code="cluster.machine",
                ) from None
    return found


def here(machine: Machine) -> Any:
    """Return Ray's strategy that places a task or an actor only on this machine."""
    return NodeAffinitySchedulingStrategy(machine.id, soft=False)


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all machines; empty for missing packages."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def check_versions(there: Mapping[str, Mapping[str, str]]) -> None:
    """Raise `ClusterError` if a machine's versions differ from those here; builds of a version may differ."""
    own = versions()
    for name, found in there.items():
        for package, ours in own.items():
            theirs = found[package]
            if _release(theirs) == _release(ours):
                continue
            fixes = {"python": f"run Python {ours}", "umbel": "install the umbel that is here"}
            fix = fixes.get(package, f"pip install '{package}=={_release(ours)}'")
            raise ClusterError(
                f"machine {name} of the Ray cluster has {f'{package} {theirs}' if theirs else f'no {package}'}, but "
                f"this one has {package} {ours}; on that machine, {fix}, and start Ray again",
                code="cluster.versions",
            )


def last_line(error: BaseException) -> str:
    """Return the end of an error of Ray's, which contains the remote traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _release(version: str) -> str:
    """Return a version without its build: PyTorch's build differs on a machine with a GPU."""
    return version.partition("+")[0]


def _told(named: str, error: Exception) -> str:
    """Return in a line why a cluster cannot be joined."""
    text = " ".join(str(error).split())
    if "Version mismatch" in text:
        return f"RAY_ADDRESS={named}: {text} Start Ray on all machines from the Python environment that is used here"
    fix = "start Ray on this machine too (ray start --address=HOST:PORT), or unset RAY_ADDRESS"
    return f"RAY_ADDRESS={named}: the cluster cannot be joined: {text}; {fix}"
