"""A SuperLink for one simulation. When the launcher ends, it ends too, with all processes that it started."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import tomli_w

from umbel.protocol.errors import LaunchError
from umbel.protocol.flower import keep_secret, without_proxy
from umbel.protocol.home import private_scratch
from umbel.protocol.logs import FORM, PLAIN
from umbel.simulation import reaper

Wait = Callable[[], dict[str, str]]
"""Waits until a SuperLink is ready, and returns the environment in which ``flwr`` finds it."""

_START_S = 300.0
_PORTS = range(20000, 32768)


@contextmanager
def superlink(home: Path, more: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Start a simulation SuperLink in `home`; yield the environment in which ``flwr`` finds it.

    The SuperLink works in an empty directory because simulated clients import from there before they import from the
    app. When this returns, all its processes have ended; if this process ends in another way, they end soon afterwards.
    `home` is empty at first; `more` are variables for the run's processes. Raises `LaunchError` if it does not start.
    """
    with starting(home, more) as wait:
        yield wait()


@contextmanager
def starting(home: Path, more: Mapping[str, str] | None = None) -> Iterator[Wait]:
    """Start like `superlink`, but yield at once a function that waits for it: other work can be done meanwhile."""
    empty, log_file = home / "empty", home / "superlink.log"
    empty.mkdir()
    port, token = free_port(), secrets.token_hex(32)
    address = f"127.0.0.1:{port}"
    connections = {"default": "simulation", "simulation": {"address": address, "insecure": True}}
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": connections}), encoding="utf-8")
    secret = home / "control.secret"
    secret.write_text(token, encoding="utf-8")
    keep_secret(home, address, token)
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # `umbel.simulation.relay` reads the log, and JSON is for other readers.
        FORM: PLAIN,
        # A new Ray, not one that happens to run here and may end before the run does.
        "RAY_ADDRESS": "local",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        **private_ray(),
        **without_proxy(),
        **(more or {}),
    }
    # Other users of this machine also reach its loopback: the guard asks for the secret.
    command = [sys.executable, "-m", "umbel", "server", "start", "--control-secret", str(secret), "--insecure"]
    command += ["--simulation", "--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
    # In separate sessions: this process handles interrupts.
    watch = subprocess.Popen(
        [sys.executable, reaper.__file__, str(home)], stdin=subprocess.PIPE, start_new_session=True
    )
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=empty, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def wait() -> dict[str, str]:
        _wait_until_up(process, port, log_file)
        return environment

    try:
        yield wait
    finally:
        # At once: a run's files are intact whenever it stops.
        reaper.end(str(home))
        process.wait()
        assert watch.stdin is not None, "it is a pipe"
        watch.stdin.close()
        watch.wait()


def private_ray() -> dict[str, str]:
    """Return the environment in which Ray listens only on loopback, asks for a random token, and keeps its files
    private.

    Ray has no option for the address; on systems where it supports only one machine it stays on loopback, and this
    variable selects that. Its own folders are open to all users, with its sockets and the code that it loads.
    """
    return {
        # The paths of sockets must be short, and macOS's folder for temporary files has a long one.
        "RAY_TMPDIR": str(private_scratch("/tmp" if sys.platform == "darwin" else "")),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Else Ray's monitor serves metrics to everybody here, as prometheus_client is installed. No port is negative.
        "AUTOSCALER_METRIC_PORT": "-1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


def tool(name: str) -> str:
    """Return a command of this Python environment."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def _wait_until_up(process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=30, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    tail = log_file.read_text(errors="replace")[-2000:]
    text = f"the SuperLink did not start within {_START_S:.0f} s; its log ends:\n{tail}"
    raise LaunchError(text, code="launch.no-superlink")


def free_port() -> int:
    """Return a port that is free now.

    Connections to other programs take their ports from 32768 on, at any time; so it is a lower one, if one is free.
    """
    with socket.socket() as sock:
        for _ in range(64):
            with suppress(OSError):
                sock.bind(("127.0.0.1", secrets.choice(_PORTS)))
                return int(sock.getsockname()[1])
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
