"""Run the app in its own Flower simulation, and leave only the results behind.

``flwr run`` alone uses a SuperLink that continues to run, in the directory and environment of the user who first
started it, and installs the app's dependencies again for each run. This launcher starts a SuperLink just for the run,
in an empty directory on a free port, and stops it afterwards. It raises an error if the run failed, which
``flwr run --stream`` does not.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import tomli_w

from umbel.protocol.cores import cores
from umbel.protocol.errors import LaunchError, told
from umbel.protocol.flower import build_bundle
from umbel.protocol.project import APP as APP
from umbel.simulation.relay import Relay
from umbel.simulation.superlink import starting, tool


def run(
    app: Path,
    values: Mapping[str, Any],
    nodes: int = 0,
    *,
    relay: Relay | None = None,
    check: Callable[[], object] = lambda: None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `app` with run-config `values` on simulated nodes, by default as suits this machine, and stream its log.

    Parameters
    ----------
    check : callable
        Called while the SuperLink starts; an error in it ends the run early.
    environment : mapping, optional
        Variables of the run's processes, in addition to this process's own.

    Raises
    ------
    LaunchError
        If the SuperLink does not start, the run cannot be submitted, or it fails.
    UmbelError
        The error that ended the run, if its server reported it.
    """
    with tempfile.TemporaryDirectory(prefix="umbel-simulation-") as scratch:
        home = Path(scratch)
        relay = relay or Relay()
        with starting(home, environment) as wait:
            try:
                check()
                submit(app, values, wait(), nodes, relay=relay, ends=False)
            except KeyboardInterrupt:
                # First of all, since stopping all processes takes a moment.
                relay.interrupted()
                raise


def submit(
    app: Path,
    values: Mapping[str, Any],
    environment: Mapping[str, str],
    nodes: int = 0,
    cpus: int = 2,
    relay: Relay | None = None,
    ends: bool = True,
) -> None:
    """Run `app` on the SuperLink that `environment` leads to (see `superlink`); errors as for `run`.

    Flower takes seconds to end a run after its last line. If the SuperLink is stopped next, `ends` = False skips that
    wait.
    """
    home, relay = Path(environment["FLWR_HOME"]), relay or Relay()
    override = home / "run-config.toml"
    override.write_text(tomli_w.dumps(values), encoding="utf-8")
    flwr = [tool("flwr"), "run", str(unpacked(app, home)), "simulation", "--stream"]
    flwr += ["--federation-config", federation_config(nodes, cpus)]
    if values:
        flwr += ["--run-config", str(override)]
    # In a separate session: this process handles interrupts.
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    process = subprocess.Popen(flwr, env=dict(environment), cwd=home, start_new_session=True, **pipes)
    try:
        assert process.stdout is not None, "it is a pipe"
        relay.pass_on(process.stdout, until_finished=not ends)
        if relay.finished and not ends:
            return
    finally:
        if process.poll() is None:
            process.terminate()
    if process.wait():
        raise LaunchError("the run could not be submitted; flwr's message is above", code="launch.not-submitted")
    status, details = _outcome(environment, home)
    if status != "finished:completed":
        reason = f"; the nodes say: {relay.reasons[0]}" if relay.reasons else ""
        why = details.removeprefix("Simulation failed with exception: ")
        # An error from the server keeps its class, and so the command's exit code.
        raise told(why, f"the run ended as {status}: ") or LaunchError(
            f"the run ended as {status}: {why or 'see the log above'}{reason}", code="launch.failed"
        )


def unpacked(app: Path, home: Path) -> Path:
    """Return a folder with only the files of an app's bundle: among few files ``flwr`` finds them at once."""
    folder = Path(tempfile.mkdtemp(prefix="app-", dir=home))
    try:
        bundle = build_bundle(app)
        with zipfile.ZipFile(BytesIO(bundle)) as archive:
            archive.extractall(folder)
        # An app may have rules that only hold among all its files; ``flwr`` itself reports problems of an app.
        return folder if build_bundle(folder) == bundle else app
    except Exception:
        return app


def federation_config(nodes: int = 0, cpus: int = 2) -> str:
    """Return Flower's federation config for this machine: a few nodes of `cpus` CPUs, each with many clients.

    On two cores this is Flower's default, two nodes of two CPUs. The nodes share the GPUs.
    """
    gpus, most = _gpus(), cores()
    nodes = nodes or max(2, min(8, gpus or most // 2))
    config = f"num-supernodes={nodes} client-resources-num-cpus={min(cpus, most)}"
    if gpus:
        workers = min(nodes, max(1, most // 2))
        config += f" client-resources-num-gpus={min(1.0, gpus / workers):g}"
    return config


def _outcome(environment: Mapping[str, str], home: Path) -> tuple[str, str]:
    """Return the status of the newest run, and Flower's details."""
    command = [tool("flwr"), "list", "simulation", "--format", "json"]
    for _ in range(50):
        listed = subprocess.run(command, env=environment, cwd=home, check=False, capture_output=True, text=True)
        try:
            newest = json.loads(listed.stdout)["runs"][0]
        except (json.JSONDecodeError, KeyError, IndexError):
            text = f"cannot tell how the run ended: {listed.stdout}{listed.stderr}"
            raise LaunchError(text, code="launch.unknown-outcome") from None
        if str(newest["status"]).startswith("finished"):
            return newest["status"], str(newest.get("status-details", ""))
        time.sleep(0.2)  # the log may end a moment before the status changes
    return newest["status"], "it is still running after its log ended"


def _gpus() -> int:
    """Return the number of NVIDIA GPUs, without the seconds that importing torch takes."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
