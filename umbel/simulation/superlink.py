"""A SuperLink for one simulation. It ends, with all that it started, when the launcher ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import tomli_w

from umbel.protocol.errors import LaunchError
from umbel.simulation import reaper

Wait = Callable[[], dict[str, str]]
"""Waits until a SuperLink is there, and returns the environment that ``flwr`` finds it by."""

_START_S = 300.0


@contextmanager
def superlink(home: Path, more: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Start a simulation SuperLink in `home`; yield the environment that ``flwr`` finds it by.

    The SuperLink works in an empty directory because simulated clients import from there before they import from the
    app. Everything it started has ended when this returns, and soon after this process has, however that ends. `home`
    is empty at first; `more` variables are for the run's processes. Raises `LaunchError` when it does not start.
    """
    with starting(home, more) as wait:
        yield wait()


@contextmanager
def starting(home: Path, more: Mapping[str, str] | None = None) -> Iterator[Wait]:
    """Do what `superlink` does, and yield, at once, what waits for it: other work can be done meanwhile."""
    empty, log_file = home / "empty", home / "superlink.log"
    empty.mkdir()
    port = free_port()
    connection = {"address": f"127.0.0.1:{port}", "insecure": True}
    config = tomli_w.dumps({"superlink": {"default": "simulation", "simulation": connection}})
    (home / "config.toml").write_text(config, encoding="utf-8")
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Its own Ray, not one that happens to run here and may end before the run does.
        "RAY_ADDRESS": "local",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        **(more or {}),
    }
    command = [tool("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--disable-runtime-dependency-installation"]
    # In their own sessions: this process acts on an interrupt.
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
        # At once: what a run leaves behind is whole whenever it stops.
        reaper.end(str(home))
        process.wait()
        assert watch.stdin is not None, "it is a pipe"
        watch.stdin.close()
        watch.wait()


def tool(name: str) -> str:
    """Return a command of this Python environment."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def _wait_until_up(process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    tail = log_file.read_text(errors="replace")[-2000:]
    text = f"the SuperLink did not start within {_START_S:.0f} s; its log ends:\n{tail}"
    raise LaunchError(text, code="launch.no-superlink")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
