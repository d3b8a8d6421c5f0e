"""The app in examples/flower_app: its modules, and runs of it in processes of Flower's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import httpx

from tests.helpers.ports import free_port
from tests.helpers.sources import ROOT

EXAMPLE = ROOT / "examples" / "flower_app"


@contextmanager
def modules(folder: Path = EXAMPLE) -> Iterator[SimpleNamespace]:
    """Import the modules of an app's only package, and forget them afterwards."""
    (package,) = [init.parent for init in folder.glob("*/__init__.py")]
    sys.path.insert(0, str(folder))
    try:
        names = sorted(file.stem for file in package.glob("*.py") if file.stem != "__init__")
        yield SimpleNamespace(**{name: import_module(f"{package.name}.{name}") for name in names})
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
            del sys.modules[name]


@contextmanager
def superlink(folder: Path) -> Iterator[dict[str, str]]:
    """Start Flower's SuperLink for simulations, and yield the environment in which `flwr run APP` uses it."""
    (folder / "empty").mkdir()  # what lies in its working directory would be imported ahead of the app
    address = f"127.0.0.1:{free_port()}"
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n', encoding="utf-8"
    )
    environment = os.environ | {
        "FLWR_HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_ADDRESS": "local",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "AUTOSCALER_METRIC_PORT": "-1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    host, _, port = address.partition(":")
    command = ["flower-superlink", "--insecure", "--simulation", "--host", host, "--port", port]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--disable-runtime-dependency-installation"],
            cwd=folder / "empty", env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not _is_up(address):
            late = process.poll() is not None or time.monotonic() > deadline
            assert not late, (folder / "log").read_text(encoding="utf-8")
            time.sleep(0.2)
        yield environment
    finally:
        process.terminate()
        process.wait(60)


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/health", timeout=30, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def flwr_run(app: Path, environment: dict[str, str], nodes: int, config: str) -> str:
    """Return the log of a run of an app in Ray, with so many nodes."""
    federation = f"num-supernodes={nodes} client-resources-num-cpus=1"
    command = ["flwr", "run", str(app), "--stream", "--federation-config", federation, "-c", config]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=True)
    return done.stdout + done.stderr
