"""A deployment on this machine: a SuperLink and SuperNodes as processes of their own, over TLS.

::

    with Deployment(folder) as deployment:
        deployment.start_node("hospital", **{"data-path": "/data/hospital"})
        run = deployment.submit(rounds=2)
        assert deployment.wait(run) == "finished:completed"

Everything lies in `folder`. When the block is left no process of the deployment remains, and no site's ledger
knows of less than the server has used (`tests.deploy.audit`).
"""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import psutil
import safetensors
import safetensors.numpy
import tomli_w
from numpy.typing import NDArray

from benchmarks.flower import unpacked
from tests.deploy.audit import audit
from tests.helpers.forks import flwr
from tests.helpers.ports import free_port
from umbel.deploy import certs
from umbel.privacy.site.journal import Journal
from umbel.protocol.flower import keep_secret
from umbel.protocol.home import write_atomically
from umbel.server.run_folder import RunFolder

APP = Path(__file__).resolve().parent.parent.parent
CONNECTION = "deployment"
SERVER = ["-m", "umbel", "server", "start"]
LONG_RUNNING = ["-c", "from umbel.cli.main import app\nfrom umbel.deploy import server\n"
                "server.check_validity = lambda *_: None\napp()", "server", "start"]  # fmt: skip
"""A server as it is after its certificate has expired, with which none starts."""
NODE = ["-m", "umbel", "site", "start"]
SUPERNODE = str(Path(sys.executable).with_name("flower-supernode"))
TAMPERED = Path(__file__).resolve().parent / "tampered"
"""What a tampered node has on its PYTHONPATH."""
START_S, RUN_S, RETURN_S, STOP_S = 900.0, 1500.0, 900.0, 300.0
"""How long something may take before it counts as hung: a busy machine is ten times slower than an idle one."""
LOOK_S = 60.0

T = TypeVar("T")


def wait_until(what: str, condition: Callable[[], T], seconds: float, pause: float = 0.1) -> T:
    """Return the first true value of `condition`; fail when there is none after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {seconds:.0f} s still no {what}"
        time.sleep(pause)
    return value


@dataclass
class Member:
    """A SuperLink or a SuperNode: a process, the leader of a group, with a folder for its home and ledger alone."""

    name: str
    process: subprocess.Popen[bytes]
    folder: Path
    command: Sequence[str]
    environment: Mapping[str, str]  # besides that of all

    @property
    def log(self) -> str:
        """What it has said so far, and the processes that it started."""
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    @property
    def node_ids(self) -> list[str]:
        """The numbers by which the SuperLink called it, one each time that it was let in."""
        return re.findall(r"SuperNode ID: (\d+)", self.log)

    @property
    def node_id(self) -> str:
        return next(iter(self.node_ids), "")

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.jsonl"

    @property
    def charges(self) -> list[dict[str, object]]:
        """Every row of the site's ledger, oldest first."""
        return list(Journal(self.ledger).rows()) if self.ledger.exists() else []

    @property
    def client_apps(self) -> list[psutil.Process]:
        """The processes that answer a message right now: children of the executor's warm process."""
        executors = self._running("executor")
        mine = {one.pid: one.ppid() for one in executors}
        return [one for one in executors if mine.get(mine[one.pid]) in mine]

    @property
    def server_apps(self) -> list[psutil.Process]:
        """The processes that lead a run right now."""
        return self._running("flwr-serverapp")

    def rounds_paid(self, run: Run) -> list[int]:
        """Return the rounds of a run that it has charged somebody for."""
        return sorted({int(str(row["round"])) for row in self.charges if row["run"] in run.ids})

    def tamper(self, plan: Mapping[int, str]) -> None:
        """Say what a tampered node does in which round from now on (`tests/deployment/tampered`)."""
        write_atomically(self.folder / "tampering.json", json.dumps(plan).encode())

    def has_heard_of(self, round: int | str, run: Run) -> bool:
        """Whether a message of a run's round has come in."""
        return f"[RUN {run.id}, ROUND {round}, " in self.log  # and how large the answer may be

    def has_answered(self, round: int | str, run: Run) -> bool:
        """Whether its answer of a run's round has left, or Flower has said that it could not send all of it."""
        _, heard, since = self.log.rpartition(f"[RUN {run.id}, ROUND {round}, ")
        return bool(heard) and re.search("Sent successfully|Failed to send message", since) is not None

    def ready(self) -> tuple[int, str]:
        """Return the status of ``/ready`` at a node, 0 where nothing answers, and the code of the reason."""
        port = self.command[self.command.index("--port") + 1]
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=30, trust_env=False)
        except httpx.HTTPError:
            return 0, ""
        return answer.status_code, answer.json().get("code", "")

    def kill(self) -> None:
        """End it, and all that it started, as a power cut does."""
        _kill([psutil.Process(self.process.pid), *self._descendants()])
        self.process.wait(STOP_S)

    def _running(self, program: str) -> list[psutil.Process]:
        return [one for one in self._descendants() if any(word.endswith(program) for word in _command_line(one))]

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


@dataclass
class Run:
    """A submitted run, as the folder that it leaves shows it."""

    runs: Path  # where the server keeps its runs
    ids: list[str] = field(default_factory=list)  # Flower's number of the run, and one for each time that it resumed

    @property
    def id(self) -> str:
        return self.ids[-1]

    @property
    def folder(self) -> Path:
        """The run's folder, named after the end of its first number."""
        [folder] = self.runs.glob(f"*-{int(self.ids[0]) % 10**6:06d}")
        return folder

    @property
    def history(self) -> list[dict[str, Any]]:
        """The finished rounds; none before the first."""
        try:
            lines = (self.folder / "history.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        except (FileNotFoundError, ValueError):
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def rounds(self) -> int:
        """After how many rounds it could go on."""
        try:
            with safetensors.safe_open(self.folder / "latest.safetensors", "numpy") as latest:
                # More follows the number (`server.run_folder`).
                return int(latest.metadata()["rounds"].split(" ")[0])
        except (FileNotFoundError, ValueError):
            return 0

    @property
    def participations(self) -> dict[int, int]:
        """How often each client released, as the server counts them."""
        return RunFolder(self.folder).read_participations()

    @property
    def releases(self) -> int:
        return sum(self.participations.values())

    def hypotheses(self, name: str = "latest") -> dict[str, NDArray[Any]]:
        """Return the arrays of a file of hypotheses."""
        return safetensors.numpy.load_file(self.folder / f"{name}.safetensors")


class Deployment:
    """A SuperLink with TLS and node authentication, the SuperNodes that are started on it, and its runs.

    It fills an empty folder. The ServerApp can import from `server_path`. With a `database` file, which takes longer,
    the SuperLink can be started again. Server and nodes run in the environment of `python`. With `soon`, Flower notices
    after half a minute that a process is gone, which takes it a minute otherwise.
    """

    def __init__(
        self, folder: Path, server_path: Sequence[Path] = (), database: bool = False,
        python: Path = Path(sys.executable), soon: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self._home, self._certs = folder, folder / "user", folder / "certs"
        self._secret = self._certs / "control.secret"
        self._port, self._database, self._python = free_port(), database, python
        self._beats = {"HEARTBEAT_S": "15"} if soon else {}
        self.nodes: dict[str, Member] = {}
        self._removed: list[Member] = []
        self.runs: list[Run] = []
        self._app: Path | None = None
        places = [*server_path, *([TAMPERED] if soon else [])]
        self._server_environment = {"PYTHONPATH": os.pathsep.join(map(str, places))} if places else {}
        self._superlink: Member | None = None

    def __enter__(self) -> Self:
        self.write_certificate()
        self._write_user(self._home)
        keep_secret(self._home, self.address, self._secret.read_text(encoding="utf-8"))
        try:
            self.start_superlink()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop()
        for run in self.runs:
            audit(run, [*self.nodes.values(), *self._removed])

    @property
    def ca(self) -> Path:
        """The certificate by which the SuperLink is known."""
        return self._certs / "ca.crt"

    @property
    def app(self) -> Path:
        """A folder with the app's files alone, among which Flower finds them at once."""
        if self._app is None:
            self._app = unpacked(self._home)
        return self._app

    @property
    def superlink(self) -> Member:
        """The SuperLink; its log holds the ServerApp's as well."""
        assert self._superlink
        return self._superlink

    def start_superlink(self, verified: bool = True) -> None:
        """Start the SuperLink, or start it again with the database that it left, if it has one.

        Its certificate must be valid, unless it is not to be `verified`.
        """
        options = {
            "host": "127.0.0.1", "port": self._port, "control-secret": self._secret, "ssl-ca-certfile": self.ca,
            "ssl-certfile": self._certs / "server.crt", "ssl-keyfile": self._certs / "server.key",
        }  # fmt: skip
        if self._database:
            options["database"] = self.folder / "superlink" / "state.db"
        command = [str(self._python), *(SERVER if verified else LONG_RUNNING), "--enable-supernode-auth"]
        command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._superlink = self._start("superlink", command, self._server_environment)
        trusted = ssl.create_default_context(cafile=self.ca)
        if not verified:
            trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE

        def healthy() -> bool:
            assert self.superlink.process.poll() is None, self.superlink.log
            try:
                return httpx.get(f"https://{self.address}/health", verify=trusted, timeout=30).is_success
            except httpx.HTTPError:
                return False

        wait_until("SuperLink", healthy, START_S)

    def start_node(
        self, name: str, tampered: bool = False, within: Sequence[str] = (), flowers_own: bool = False,
        ahead: float = 0.0, **node_config: Any,
    ) -> Member:  # fmt: skip
        """Start a SuperNode with a key that the SuperLink knows; its ledger lies in its folder.

        The client processes of a `tampered` one do as `Member.tamper` says, and else as the app says. `within` is a
        command that runs the command behind it somewhere else. With `flowers_own`, Flower's own executor runs the
        server's code. Its clock is `ahead` by some seconds.
        """
        key = self.write_key(name)
        self.flwr("supernode", "register", f"{key}.pub", CONNECTION, "--name", name)
        options = ["--auth-supernode-private-key", str(key), *self._tls]
        environment = {"PYTHONPATH": str(TAMPERED), "AHEAD_S": str(ahead)} if tampered or ahead else {}
        program = [SUPERNODE, "--host", "127.0.0.1"] if flowers_own else [str(self._python), *NODE]
        self.nodes[name] = self._start_node(name, options, node_config, [*within, *program], environment)
        self.nodes[name].tamper({})
        return self.nodes[name]

    def remove_node(self, name: str) -> str:
        """Kill a node, and have the SuperLink forget it; return its number there."""
        self._removed.append(node := self.nodes.pop(name))
        node.kill()
        self.flwr("supernode", "unregister", node.node_id, CONNECTION)
        return node.node_id

    def restart_node(self, name: str) -> None:
        """Start a SuperNode that was killed again, with its key, and wait until it is let in."""
        before = self.nodes[name]
        known = len(before.node_ids)

        def back() -> bool:
            if self.nodes[name].process.poll() is not None:
                self.start_again(name)
            return len(self.nodes[name].node_ids) > known

        # Each try takes a share of the machine from the run.
        wait_until(f"return of {name}", back, RETURN_S, pause=4.0)

    def start_again(self, name: str) -> Member:
        """Start a SuperNode that has ended once more, with its key."""
        before = self.nodes[name]
        self.nodes[name] = self._start(name, before.command, before.environment)
        return self.nodes[name]

    def start_stranger(self, name: str, key: Path | None = None) -> Member:
        """Start a SuperNode of Flower's with a key that the SuperLink does not know, or none."""
        options = [*self._tls, "--max-retries", "3"]
        options += ["--auth-supernode-private-key", str(key)] if key else []
        return self._start_node(name, options, {}, [SUPERNODE])

    def write_certificate(self, *nodes: str) -> None:
        """Have `umbel certs` make what is missing, and renew the server's certificate if it is about to expire."""
        certs.make(self._certs, ["127.0.0.1"], [*nodes], os.getuid())

    def write_key(self, name: str) -> Path:
        """Make a key that the SuperLink does not know yet."""
        self.write_certificate(name)
        return self._certs / name

    def wait_until_online(self, *names: str) -> None:
        """Wait until these nodes, or else all that were started, are there."""
        nodes = [self.nodes[name] for name in names or self.nodes]

        def known(node: Member) -> str:
            assert node.process.poll() is None, f"{node.name} has ended:\n{node.log}"
            return node.node_id

        for node in nodes:
            wait_until(f"connection of {node.name}", partial(known, node), START_S)
        wanted = {node.node_id for node in nodes}

        def online() -> bool:
            listed = json.loads(self.flwr("supernode", "list", CONNECTION, "--format", "json"))["nodes"]
            return wanted <= {node["node-id"] for node in listed if node["status"] == "online"}

        wait_until("nodes online", online, START_S)

    def submit(self, app: Path | None = None, **run_config: Any) -> Run:
        """Submit a run of the app, or of another one; a key is a run-config key with underscores."""
        run = Run(self.folder / "superlink" / "umbel" / "runs", [self._submit(run_config, app)])
        self.runs.append(run)
        return run

    def resume(self, run: Run, **run_config: Any) -> None:
        """Have a run that was interrupted go on, with all else in its config as it was."""
        run.ids.append(self._submit(run_config | {"resume": run.folder.name}))

    def _submit(self, run_config: Mapping[str, Any], app: Path | None = None) -> str:
        values = {key.replace("_", "-"): value for key, value in run_config.items()}
        override = self._home / "run-config.toml"
        override.write_text(tomli_w.dumps(values), encoding="utf-8")
        answer = self.flwr("run", str(app or self.app), CONNECTION, "--run-config", str(override), "--format", "json")
        return str(json.loads(answer)["run-id"])

    def status(self, run: Run) -> str:
        """Return what Flower says of a run."""
        answer = self.flwr("list", CONNECTION, "--run-id", run.id, "--format", "json")
        return str(json.loads(answer)["runs"][0]["status"])

    def server_log(self, run: Run) -> str:
        """Return what the ServerApp of a run has logged."""
        return self.flwr("log", run.id, CONNECTION, "--show")

    def wait(self, run: Run, seconds: float = RUN_S) -> str:
        """Return the status with which a run ends."""
        looked = time.monotonic()

        def finished() -> str:
            nonlocal looked
            # Each look starts a process, which takes a share of the machine from the run itself. That a run has ended
            # stands in the SuperLink's log, but for one whose ServerApp died.
            ended = re.search(rf"Finished task \d+ of run {run.id}\b", self.superlink.log)
            if not ended and time.monotonic() < looked + LOOK_S:
                return ""
            looked = time.monotonic()
            status = self.status(run)
            return status if status.startswith("finished") else ""

        return wait_until(f"end of run {run.id}", finished, seconds, pause=0.5)

    def flwr(self, *arguments: str, home: Path | None = None) -> str:
        """Return what a command of Flower prints for the operator, or for another user says as it fails."""
        done = flwr(arguments, self._environment(home or self._home), home or self._home, START_S)
        assert (done.returncode == 0) is (home is None), f"flwr {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
        return done.stdout + (done.stderr if home else "")

    def flwr_of_somebody(self, *arguments: str) -> str:
        """Return what a command of Flower says as it fails for somebody who has ``ca.crt`` and no secret."""
        if not (home := self.folder / "somebody").exists():
            self._write_user(home)
        return self.flwr(*arguments, home=home)

    def _write_user(self, home: Path) -> None:
        """Write where `flwr` of a user finds the SuperLink."""
        home.mkdir()
        connection = {"address": self.address, "root-certificates": str(self.ca)}
        config = tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: connection}})
        (home / "config.toml").write_text(config, encoding="utf-8")

    def tails(self, lines: int = 40) -> str:
        """Return the ends of all logs, for whoever reads why a test failed."""
        logs = {log: log.read_text(encoding="utf-8", errors="replace") for log in sorted(self.folder.glob("*/log"))}
        return "\n".join("\n".join([f"--- {log.parent.name}", *logs[log].splitlines()[-lines:]]) for log in logs)

    def processes(self) -> list[psutil.Process]:
        """Return all living processes of the deployment, whoever started them: Flower's own homes tell them."""
        mine = []
        for process in psutil.process_iter():
            try:
                home = process.environ().get("FLWR_HOME", "")
                dead = process.status() == psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if not dead and Path(home).is_relative_to(self.folder):
                mine.append(process)
        return mine

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"127.0.0.1:{self._port}"

    @property
    def _tls(self) -> list[str]:
        return ["--root-certificates", str(self.ca)]

    def _start_node(
        self, name: str, options: Sequence[str], node_config: dict[str, Any], program: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> Member:  # fmt: skip
        node_config = {"ledger-path": str(self.folder / name / "ledger.jsonl")} | node_config
        pairs = " ".join(line.replace(" = ", "=", 1) for line in tomli_w.dumps(node_config).splitlines())
        command = [*program, "--superlink", self.address, *options]
        return self._start(name, [*command, "--node-config", pairs, "--port", str(free_port())], environment or {})

    def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Member:
        folder = self.folder / name
        # What lies in its working directory would be imported ahead of the app.
        (folder / "empty").mkdir(parents=True, exist_ok=True)
        # A home of its own: bundles are not installed in one step, and two nodes could load half of one.
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=folder / "empty", env={**self._environment(folder), **environment}, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return Member(name, process, folder, command, environment)

    def _environment(self, home: Path) -> dict[str, str]:
        # Whatever else is called UMBEL_ would be read as the site's policy.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("UMBEL_", "FLWR_"))}
        return inherited | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "UMBEL_HOME": str(home / "umbel"),
            "XDG_STATE_HOME": str(home / "state"),
            "OMP_NUM_THREADS": "1",
            **self._beats,
            "PATH": os.pathsep.join([str(self._python.parent), os.environ.get("PATH", "")]),
        }

    def _stop(self) -> None:
        """End all processes, politely first, and make sure that none is left."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, stubborn = psutil.wait_procs(self.processes(), STOP_S)
        _kill(stubborn)
        _kill(self.processes())
        assert not self.processes(), "a process outlives its deployment"


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, STOP_S)


def _command_line(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []
