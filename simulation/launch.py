"""Run the app in a Flower simulation of its own, and leave nothing behind but the results.

``flwr run`` alone uses a SuperLink that goes on running, in the directory and environment of
whoever started it first, and installs the app's dependencies anew for each run. This launcher
starts one just for the run, in an empty directory on a free port, and stops it afterwards. It
exits with an error when the run failed, which ``flwr run --stream`` does not.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import tomli_w
import typer

from protocol.cli import command_line, errors_in_one_line
from protocol.errors import LaunchError
from protocol.flower import build_bundle

APP = Path(__file__).resolve().parent.parent
_START_S = 300.0
_STOP_S = 60.0


def main(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file of run-config values.")] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Run-config values; they win over the file's.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=0, help="SuperNodes; 0 for as many as suit this machine.")] = 0,
    app: Annotated[Path, typer.Option(help="The Flower App.")] = APP,
) -> None:
    """Run the app once, in simulation, with a SuperLink of its own."""
    with errors_in_one_line():
        run(app, read_settings(config, settings or []), nodes)


def read_settings(config: Path | None, settings: list[str]) -> dict[str, Any]:
    """Return the run-config values of a TOML file and of ``key=value`` pairs, the latter first."""
    try:
        values = tomllib.loads(config.read_text(encoding="utf-8")) if config else {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise LaunchError(f"cannot read {config}: {error}") from None
    for setting in settings:
        if "=" not in setting:
            raise LaunchError(f"{setting!r} is not KEY=VALUE")
        try:
            values |= tomllib.loads(setting)
        except tomllib.TOMLDecodeError:
            # As a shell hands it over: without the quotes of TOML.
            key, _, text = setting.partition("=")
            values[key.strip()] = text.strip()
    return values


def run(app: Path, values: dict[str, Any], nodes: int = 0) -> None:
    """Run `app` with run-config `values` and stream its log.

    Raises
    ------
    LaunchError
        When the SuperLink does not start, the run cannot be submitted, or it fails.
    """
    with tempfile.TemporaryDirectory(prefix="umbel-simulation-") as scratch:
        home = Path(scratch)
        with superlink(home) as environment:
            submit(app, values, environment, nodes)


def submit(app: Path, values: dict[str, Any], environment: dict[str, str], nodes: int = 0, cpus: int = 2) -> None:
    """Run `app` on the SuperLink that `environment` leads to (see `superlink`); errors as `run`."""
    home = Path(environment["FLWR_HOME"])
    override = home / "run-config.toml"
    override.write_text(tomli_w.dumps(values), encoding="utf-8")
    flwr = [_tool("flwr"), "run", str(unpacked(app, home)), "simulation", "--stream"]
    flwr += ["--federation-config", federation_config(nodes, cpus)]
    if values:
        flwr += ["--run-config", str(override)]
    if subprocess.run(flwr, env=environment, cwd=home, check=False).returncode:
        raise LaunchError("the run could not be submitted; flwr's message is above")
    status, details = _outcome(environment, home)
    if status != "finished:completed":
        raise LaunchError(f"the run ended as {status}: {details or 'see the log above'}")


def unpacked(app: Path, home: Path) -> Path:
    """Return a folder with the files of an app that make its bundle: among few files ``flwr`` finds them at once."""
    folder = Path(tempfile.mkdtemp(prefix="app-", dir=home))
    try:
        bundle = build_bundle(app)
        with zipfile.ZipFile(BytesIO(bundle)) as archive:
            archive.extractall(folder)
        # An app may have rules that only hold among all its files; and what is wrong with it, ``flwr`` itself says.
        return folder if build_bundle(folder) == bundle else app
    except Exception:
        return app


def federation_config(nodes: int = 0, cpus: int = 2) -> str:
    """Return Flower's federation config for this machine: a handful of nodes of `cpus` CPUs, each hosting many clients.

    On two cores this is Flower's own default, two nodes of two CPUs. GPUs are shared out among
    the nodes.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = _gpus()
    nodes = nodes or max(2, min(8, gpus or cores // 2))
    config = f"num-supernodes={nodes} client-resources-num-cpus={min(cpus, cores)}"
    if gpus:
        workers = min(nodes, max(1, cores // 2))
        config += f" client-resources-num-gpus={min(1.0, gpus / workers):g}"
    return config


@contextmanager
def superlink(home: Path) -> Iterator[dict[str, str]]:
    """Start a simulation SuperLink in `home`; yield the environment that ``flwr`` finds it by.

    The SuperLink works in an empty directory because simulated clients import from there before
    they import from the app. Everything it started has ended when this returns.
    """
    empty, log_file = home / "empty", home / "superlink.log"
    empty.mkdir()
    port = _free_port()
    (home / "config.toml").write_text(
        tomli_w.dumps(
            {"superlink": {"default": "simulation", "simulation": {"address": f"127.0.0.1:{port}", "insecure": True}}}
        ),
        encoding="utf-8",
    )
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A Ray of its own, not one that happens to run here and may end before the run does.
        "RAY_ADDRESS": "local",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    command = [_tool("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--disable-runtime-dependency-installation"]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=empty, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_up(process, port, log_file)
            yield environment
        finally:
            _stop(process, home)


def _wait_until_up(process: subprocess.Popen[bytes], port: int, log_file: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    tail = log_file.read_text(errors="replace")[-2000:]
    raise LaunchError(f"the SuperLink did not start within {_START_S:.0f} s; its log ends:\n{tail}")


def _stop(process: subprocess.Popen[bytes], home: Path) -> None:
    """Stop the SuperLink and all that it started, politely first."""
    process.terminate()
    for sign in (None, signal.SIGTERM, signal.SIGKILL):
        # Some are in sessions of their own, and not all are children any more; what they inherited tells.
        started = [one for one in psutil.process_iter(["environ"]) if _flwr_home(one) == str(home)]
        for one in started:
            with suppress(psutil.NoSuchProcess):
                if sign is not None:
                    one.send_signal(sign)
        psutil.wait_procs(started, timeout=_STOP_S)
    process.wait()


def _flwr_home(process: psutil.Process) -> str | None:
    environment: dict[str, str] | None = process.info["environ"]
    return (environment or {}).get("FLWR_HOME")


def _outcome(environment: dict[str, str], home: Path) -> tuple[str, str]:
    """Return the status of the newest run, and Flower's details."""
    command = [_tool("flwr"), "list", "simulation", "--format", "json"]
    for _ in range(50):
        listed = subprocess.run(command, env=environment, cwd=home, check=False, capture_output=True, text=True)
        try:
            newest = json.loads(listed.stdout)["runs"][0]
        except (json.JSONDecodeError, KeyError, IndexError):
            raise LaunchError(f"cannot tell how the run ended: {listed.stdout}{listed.stderr}") from None
        if str(newest["status"]).startswith("finished"):
            return newest["status"], str(newest.get("status-details", ""))
        time.sleep(0.2)  # the log may end a moment before the status does
    return newest["status"], "it goes on after its log ended"


def _gpus() -> int:
    """Return the number of NVIDIA GPUs, without the seconds that importing torch takes."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _tool(name: str) -> str:
    """Return a command of this Python environment."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


if __name__ == "__main__":
    command_line(main)()
