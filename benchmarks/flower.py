"""Time a round of the hospital's clients through ``flwr run``, in Ray, and in this process.

    python -m benchmarks.flower [--rounds 60] [--nodes 2] [--out FILE]

Both do the same rounds. ``flwr run`` adds Flower's waiting: a message lies until a worker looks for the next one.

Other benchmarks use `simulation`: a SuperLink with its own home, port and Ray, which all end with it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import tomli_w
import typer

from benchmarks import in_process
from benchmarks.measure import Out, benchmark, console, table_of
from benchmarks.peers.tasks import hospital
from umbel.protocol.cores import cores
from umbel.protocol.flower import build_bundle, without_proxy
from umbel.protocol.project import APP

_START_S = 300.0
_TOO_SLOW = "timed out during startup"
"""Part of what Ray says of a node that did not start in 30 seconds, which no setting changes."""


def main(
    rounds: Annotated[int, typer.Option(min=2, help="Of a run; the first does not count.")] = 60,
    nodes: Annotated[int, typer.Option(min=1, help="Simulated nodes.")] = 2,
    out: Out = None,
) -> None:
    """Print the median of a round, and what ``flwr run`` takes from its start to the first."""
    with benchmark(out, "ray"):
        compare("the hospital", hospital() | {"rounds": rounds}, nodes)


def compare(task: str, config: Mapping[str, Any], nodes: int) -> None:
    """Time a task's rounds in this process, and by ``flwr run``."""
    in_process.rounds(config)  # to warm up
    alone = in_process.go(config).seconds
    history, startup = history_of(config, nodes)
    show(task, [one["seconds"] for one in history if one["asked"]][1:], nodes, alone, startup)


def show(task: str, seconds: list[float], nodes: int, alone: float, startup: float) -> None:
    """Print what rounds take, in seconds through ``flwr run`` and in this process, and how long the first waits."""
    table = table_of(f"Milliseconds of a round of {task}", ("", "median", "lowest to highest"))
    found = f"{1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f}"
    table.add_row(f"flwr run, {nodes} nodes, {len(seconds)} rounds", f"{1e3 * statistics.median(seconds):.0f}", found)
    table.add_row("umbel run, in this process", f"{1e3 * alone:.1f}", "")
    console.print(table)
    console.print(f"flwr run took {startup:.1f} s from its start to its first round.")


def history_of(
    config: Mapping[str, Any], nodes: int, gpus: int = 0, client: str = ""
) -> tuple[list[dict[str, Any]], float]:
    """Run umbel's app by ``flwr run``, on nodes with so many GPUs each, and with another ClientApp if one is named.

    Return its rounds, and the seconds from its start to the first.
    """
    began = time.time()
    with simulation({"PYTHONPATH": str(APP)}) as flower:
        app = unpacked(flower.home)
        if client:
            project = app / "pyproject.toml"
            project.write_text(project.read_text("utf-8").replace("umbel.client.app:app", client), encoding="utf-8")
        flower.run(app, config, nodes, min(2, cores()), gpus)
        [folder] = (flower.home / "umbel" / "runs").iterdir()
        # Written when all nodes are there, and the first round is next.
        startup = (folder / "config.toml").stat().st_mtime - began
        lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], startup


@dataclass(frozen=True)
class Simulation:
    """A simulation SuperLink that runs, and the environment in which ``flwr`` finds it."""

    home: Path
    environment: Mapping[str, str]

    def run(self, app: Path, values: Mapping[str, Any], nodes: int, cpus: int = 1, gpus: int = 0) -> str:
        """Run an app on nodes with so many CPUs and GPUs each, and return its log; ``flwr run`` would not say if it
        failed."""
        override = self.home / "run-config.toml"
        override.write_text(tomli_w.dumps(values), encoding="utf-8")
        federation = f"num-supernodes={nodes} client-resources-num-cpus={cpus}"
        federation += f" client-resources-num-gpus={gpus}" if gpus else ""
        words = ["--run-config", str(override), "--federation-config", federation]
        # On a busy machine Ray may need several tries.
        while _TOO_SLOW in (log := self.flwr("run", str(app), "--stream", *words)):
            print(f"Ray {_TOO_SLOW}; run again", file=sys.stderr)
        while not (status := self._status()).startswith("finished"):
            time.sleep(0.2)  # the log may end a moment before
        if status != "finished:completed":
            raise RuntimeError(f"the run ended as {status}: {log[-4000:]}")
        return log

    def flwr(self, *words: str) -> str:
        """Call Flower's command, and return what it says."""
        command = [_found("flwr", self.environment), *words]
        done = subprocess.run(command, env=self.environment, cwd=self.home, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr[-4000:]}")
        return done.stdout

    def _status(self) -> str:
        return str(json.loads(self.flwr("list", "--format", "json"))["runs"][0]["status"])


@contextmanager
def simulation(more: Mapping[str, str] | None = None, port: int = 0) -> Iterator[Simulation]:
    """Start a simulation SuperLink, with further variables for it and its runs, at a port or any that is free."""
    port = port or free_port()
    with tempfile.TemporaryDirectory(prefix="umbel-flower-") as scratch:
        home = Path(scratch)
        # A SuperLink's working directory is imported from ahead of the app.
        (home / "empty").mkdir()
        environment = os.environ | {
            "FLWR_HOME": scratch,
            "UMBEL_HOME": str(home / "umbel"),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": scratch,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "AUTOSCALER_METRIC_PORT": "-1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            **without_proxy(),
            **(more or {}),
        }
        command = [_found("flower-superlink", environment), "--insecure", "--simulation", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--disable-runtime-dependency-installation"]
        with (home / "superlink.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=home / "empty", env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            _wait_until_up(process, port)
            yield Simulation(home, environment)
        finally:
            end(scratch)
            process.wait()


def unpacked(home: Path) -> Path:
    """Return a new folder with the files of umbel's app alone."""
    folder = Path(tempfile.mkdtemp(prefix="app-", dir=home))
    with zipfile.ZipFile(BytesIO(build_bundle(APP))) as archive:
        archive.extractall(folder)
    return folder


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def started(home: str) -> list[psutil.Process]:
    """Return the processes with this FLWR_HOME: some are in separate sessions, and all inherit it."""
    return [one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get("FLWR_HOME") == home]


def end(home: str) -> None:
    """Kill all processes with this FLWR_HOME, and those that they start meanwhile."""
    while left := started(home):
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=10)


def _found(program: str, environment: Mapping[str, str]) -> str:
    """Return the path of a program, as an environment names it."""
    found = shutil.which(program, path=environment["PATH"])
    assert found is not None, f"{program} comes with Flower"
    return found


def _wait_until_up(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=30, trust_env=False).is_success:
                return
        time.sleep(0.2)
    raise RuntimeError("the SuperLink did not start")


if __name__ == "__main__":
    typer.run(main)
