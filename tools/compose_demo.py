"""Learn the cost of a hospital stay over three sites, in containers on this machine.

A server and three sites talk over TLS. Each site has its hospitals, a key, a ledger and a policy. At the end everything
is taken down except the volumes with the ledgers: the next run continues to charge them.

    python -m tools.compose_demo
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

import tomli_w
import typer

from tools.split import split
from umbel.client.bundle import unpack
from umbel.data import find_dataset
from umbel.deploy import certs
from umbel.deploy.guard import read_secret
from umbel.deploy.health import healthy
from umbel.protocol.cli import command_line, errors_in_one_line
from umbel.protocol.errors import UmbelError
from umbel.protocol.flower import keep_secret
from umbel.protocol.home import make_folder, umbel_home, write_atomically
from umbel.protocol.project import APP, CONFIGS

SITES = ("site-1", "site-2", "site-3")
APPS = tuple(f"{site}-app" for site in SITES)
CONFIG = CONFIGS / "hospital-sites.toml"
# Each site's manifest says which clients train. A training client spends 3.2 in a run, enough for 5 runs. A validation
# client spends 2 * 2 / 10 = 0.4 on a report, and 2.8 on the 7 of a run: also 5 runs. Errors are clipped to 0.25, which
# is 2,500 dollars: the noise on the mean of three sites with 295 such clients each has a standard deviation of 60
# dollars.
POLICY = (
    'role="split" min-noise-multiplier=10.0 clipping="public" max-choice-epsilon=1.0 budget=16.0 '
    'reports="noise=10.0 bound=0.25"'
)
LEDGER = "/ledger/umbel.jsonl"
MAKE_LEDGER = f"test -e {LEDGER} || umbel site journal --create {LEDGER}"
_READY_S, _LOOK_S = 300.0, 0.3
_RUN_S = 1800.0
"""Longest time of the run, which takes about two minutes on a machine that has nothing else to do."""
LOGS = "containers.log"

Run = Callable[..., str]


class DemoError(UmbelError, kind="demo"):
    """The demonstration cannot continue."""


def main() -> None:
    """Build the image, start a server and three sites, run, show the result, take everything down."""
    home = umbel_home() / "demo"
    with errors_in_one_line():
        owner = int(os.environ.get("IMAGE_UID", "1000"))
        for folder in split(find_dataset("hospital"), len(SITES), home):
            _hand_over(folder, owner)
        certs.make(home / "certs", [], list(SITES), owner=owner)
        compose = composer(home)
        compose("build", "image")
        try:
            results = _run(compose, home / "certs")
        except DemoError:
            _keep_logs(compose, home / LOGS)
            raise
        finally:
            # The volumes stay, with each site's ledger.
            compose("down")
        _title("All containers are stopped; the sites' ledgers remain on their volumes")
        with ThreadPoolExecutor() as at_once:
            check = ("run", "--rm", "--no-deps", "-T")
            list(at_once.map(lambda app: compose(*check, app, "umbel", "site", "journal", LEDGER), APPS))
        compose("down")
    typer.echo(f"The results are in this folder; open report.html first:\n{results}")


def _hand_over(folder: Path, owner: int) -> None:
    """Make the containers' user the owner of a site's data, because only their owner may read them."""
    if os.geteuid() == 0:  # others are that user themselves
        for path in (folder, *folder.iterdir()):
            os.chown(path, owner, owner)


def composer(home: Path, project: str = "umbel-demo") -> Run:
    """Return a function that runs Compose on the demo's services, and returns its output if asked to capture."""
    environment = os.environ | {
        "COMPOSE_PROJECT_NAME": project,
        "CERTS": str(home / "certs"),
        "DEMO": str(home),
        "LISTEN": "127.0.0.1:",  # a free port, only for this machine
        "POLICY": POLICY,
        "SERVER": "superlink:8000",
    }
    docker_compose = [_tool("docker-compose"), "--progress", "quiet", "--profile", "demo"]
    return lambda *arguments, capture=False: _call([*docker_compose, *arguments], environment, capture)


def _run(compose: Run, keys: Path) -> Path:
    """Start everything, run the task, and return the folder with its results."""
    with started(compose, keys) as flwr, tempfile.TemporaryDirectory() as scratch:
        _title("The run")
        unpack(app := Path(scratch) / "umbel")
        with suppress(subprocess.TimeoutExpired):
            flwr("run", str(app), "demo", "--stream", "--run-config", str(CONFIG), seconds=_RUN_S)
        run = json.loads(flwr("list", "demo", "--format", "json", capture=True))["runs"][0]
        if not run["status"].startswith("finished"):
            text = (
                f"the run has not ended within {_RUN_S / 60:.0f} minutes, its status is {run['status']!r}; end other "
                "programs on this machine, then start the demonstration again"
            )
            raise DemoError(text, code="demo.too-slow")
        if run["status"] != "finished:completed":
            text = f"the run ended as {run['status']}: {run.get('status-details') or 'see the log above'}"
            raise DemoError(text, code="demo.run-failed")
    return _fetch(compose)


@contextmanager
def started(compose: Run, keys: Path) -> Iterator[Run]:
    """Start the server and the sites; yield a function that runs `flwr` as the researcher, who has the secret.

    The sites may still be starting: a run waits for them. All programs load at the same time, since loading takes
    longest.
    """
    _title("The server, and the sites' executors")
    compose("up", "--detach", "--no-deps", "superlink", *APPS)
    address = f"localhost:{compose('port', 'superlink', '8000', capture=True).strip().rpartition(':')[2]}"
    with tempfile.TemporaryDirectory(prefix="umbel-demo-") as scratch:
        connection = {"address": address, "root-certificates": str(keys / "ca.crt")}
        config = tomli_w.dumps({"superlink": {"default": "demo", "demo": connection}})
        (Path(scratch) / "config.toml").write_text(config, encoding="utf-8")
        keep_secret(Path(scratch), address, read_secret(keys / "control.secret").decode())
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        environment = os.environ | quiet | {"FLWR_HOME": scratch}

        def flwr(*arguments: str, capture: bool = False, seconds: float | None = None) -> str:
            return _call([_tool("flwr"), *arguments], environment, capture, seconds)

        _title("The sites: make their ledgers, register their keys, start them")
        with ThreadPoolExecutor() as at_once:
            ledgers = at_once.map(lambda app: compose("exec", "-T", app, "sh", "-c", MAKE_LEDGER), APPS)
            _wait_until_ready(address, keys / "ca.crt")
            compose("up", "--detach", "--no-deps", "serverapp")  # not before: Compose would wait for the server itself
            list(at_once.map(lambda site: _register(keys / f"{site}.pub", environment), SITES))
            list(ledgers)
        compose("up", "--detach", "--no-deps", *SITES)
        yield flwr


def _register(key: Path, environment: Mapping[str, str]) -> None:
    """Register a node's key at the server, unless it is registered already."""
    command = [_tool("flwr"), "supernode", "register", str(key), "demo", "--name", key.stem]
    done = subprocess.run(command, env=dict(environment), check=False, capture_output=True, text=True)
    answer = (done.stdout + done.stderr).strip()
    if done.returncode and "already in use" not in answer:
        raise DemoError(f"{key.stem} could not be registered: {answer}", code="demo.not-registered")
    typer.echo(f"{key.stem} is registered")


def _wait_until_ready(address: str, ca: Path) -> None:
    """Wait for the server: Compose would look every ten seconds."""
    deadline = time.monotonic() + _READY_S
    with redirect_stdout(None):  # each failure's reason
        while not healthy(f"https://{address}/ready", str(ca)):
            if time.monotonic() > deadline:
                raise DemoError(f"the server is not ready after {_READY_S:.0f} s", code="demo.offline")
            time.sleep(_LOOK_S)


def _keep_logs(compose: Run, file: Path) -> None:
    """Write what the containers said, which ends with them, to a file."""
    with suppress(DemoError):
        write_atomically(file, compose("logs", "--no-color", "--timestamps", capture=True).encode())
        typer.echo(f"The containers' logs are in {file}", err=True)


def _fetch(compose: Run) -> Path:
    """Copy the newest run's folder from the server's volume to this machine's runs."""
    newest = compose("exec", "-T", "serverapp", "ls", "/umbel/runs", capture=True).split()[-1]
    runs = umbel_home() / "runs"
    make_folder(runs)
    compose("cp", f"serverapp:/umbel/runs/{newest}", str(runs))
    return runs / newest


def _call(
    command: list[str], environment: Mapping[str, str], capture: bool = False, seconds: float | None = None
) -> str:
    """Run a command in the project's folder; raise if it fails, and end it if it takes longer than so many seconds."""
    done = subprocess.run(
        command, env=dict(environment), cwd=APP, check=False, text=True, timeout=seconds,
        stdout=subprocess.PIPE if capture else None,
    )  # fmt: skip
    if done.returncode:
        text = f"`{Path(command[0]).name} {' '.join(command[1:])}` failed; its message is above"
        raise DemoError(text, code="demo.step-failed")
    return done.stdout or ""


def _tool(name: str) -> str:
    """Return a command of this Python environment, or of the system."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    if found := shutil.which(name):
        return found
    raise DemoError(f"{name} is not installed; run make compose-demo, which installs it", code="demo.not-installed")


def _title(text: str) -> None:
    typer.secho(f"\n{text}", bold=True)


if __name__ == "__main__":
    command_line(main)()
