"""Join many sites to one SuperLink, as deployments do, until something breaks.

    python -m benchmarks.many_sites [--nodes 10,50,100,200] [--real 5] [--rounds 6] [--parameters 2] [--database sqlite]
        [--out FILE]

For each number of nodes a separate SuperLink (`umbel server start`) speaks TLS on loopback, knows each node by
a key, and runs umbel's ServerApp in a separate process; each round asks all nodes. Real nodes are
`umbel site start`: with their executors, some hundred MB each. The others only answer (`benchmarks.light_nodes`),
which loads the SuperLink as much and this machine little. Joining is from the run's submission until all nodes
have said what they host; the first round warms up. Beside a round's seconds (median, lowest to highest) stand those
that the SuperLink and the ServerApp computed in it, one plus the other, and the most memory that they had.
"""

from __future__ import annotations

import os
import re
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import numpy as np
import psutil
import typer
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from rich.markup import escape
from rich.table import Table

import umbel
from benchmarks.flower import end, free_port
from benchmarks.light_nodes import FAILED, ONLINE
from benchmarks.measure import Out, benchmark, console
from umbel.protocol.flower import build_bundle
from umbel.protocol.project import APP
from umbel.server.history import Round
from umbel.server.run_folder import RunFolder

_MIB = 1 << 20
_HOST = "127.0.0.1"
# Light nodes of one process; with more of them they wait for each other more than for the SuperLink.
_TOGETHER = 50
_POLICY = 'clipping="any" max-choice-epsilon="inf" budget="inf"'  # accepts what is asked, the paper's settings
_START_S, _ROUND_S, _LOOK_S = 600.0, 300.0, 0.2
HEADINGS = ("nodes", "s to join", "s a round", "s computed", "MiB at most", "MiB a node", "MiB database", "what failed")
_PARTIES = ("SuperLink", "ServerApp")
Database = Literal["sqlite", "memory"]


@dataclass
class Reading:
    """The cost of a run with so many nodes, and the number of failures of each kind.

    Seconds until all nodes had said what they host, and of each round but the first; by process, seconds of a core in a
    round, and MiB at the most; MiB of a node, and of the SuperLink's database.
    """

    nodes: str
    joined: float = 0.0
    rounds: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    node: float = 0.0
    database: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        times = self.rounds or [float("nan")]
        return (
            self.nodes,
            f"{self.joined:.0f}",
            f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})",
            " + ".join(f"{self.cpu.get(name, 0):.1f}" for name in _PARTIES),
            " + ".join(f"{self.memory.get(name, 0):.0f}" for name in _PARTIES),
            f"{self.node:.1f}",
            f"{self.database:.1f}",
            ", ".join(f"{number} x {what}" for what, number in self.failures.most_common(3)),
        )


def main(
    nodes: Annotated[str, typer.Option(help="Numbers of nodes that only answer.")] = "10,50,100,200",
    real: Annotated[str, typer.Option(help="Numbers of real nodes, to compare with; empty for none.")] = "5",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each run.")] = 6,
    parameters: Annotated[int, typer.Option(min=2, help="Of the model, which is linear.")] = 2,
    database: Annotated[Database, typer.Option(help="Of the SuperLink; deployments have SQLite.")] = "sqlite",
    out: Out = None,
) -> None:
    """Print a row a number of nodes."""
    wanted = [(number, text is real) for text in (real, nodes) for number in numbers_in(text)]
    if not wanted:
        raise typer.BadParameter("no number of nodes is given")
    failed = False
    table = Table(*HEADINGS, title=f"Many sites, {parameters:,} parameters, database {database}", title_justify="left")
    with benchmark(out, "httpx", "uvicorn", "sqlalchemy"):
        try:
            for number, is_real in wanted:
                reading = measure(number, rounds, parameters, database == "sqlite", is_real)
                table.add_row(*map(escape, reading.cells))
                failed |= len(reading.rounds) < rounds - 1
                print("  ".join(reading.cells), file=sys.stderr)  # the next takes minutes
        finally:
            console.print(table)
    if failed:
        raise typer.Exit(1)


def numbers_in(text: str) -> list[int]:
    """Return numbers of nodes, separated by commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [part for part in parts if not part.isdecimal() or int(part) < 1]:
        raise typer.BadParameter(f"{wrong[0]!r} is no number of nodes")
    return [int(part) for part in parts]


def measure(
    nodes: int,
    rounds: int,
    parameters: int,
    sqlite: bool = True,
    real: bool = False,
    policies: Callable[[Path, Sequence[str]], Sequence[str]] | None = None,
    **changes: Any,
) -> Reading:
    """Run with so many nodes and return its cost, with all failures.

    `changes` are those of the run config. `policies` returns entries of real nodes' configurations, from a folder and
    the nodes' names.
    """
    reading = Reading(f"{nodes} real" if real else str(nodes))
    names = [f"site-{i}" for i in range(nodes)]
    with place(names) as home, ExitStack() as stack:
        address = f"{_HOST}:{free_port()}"
        superlink = start_superlink(home, address, sqlite)
        # In place of a process of ``flwr`` for each node.
        ca, interceptors = (home / "ca.crt").read_bytes(), [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
        control = stack.enter_context(ControlHttpClient.from_server_address(address, False, ca, interceptors))
        for name in names:
            public: Any = load_ssh_public_key((home / f"{name}.pub").read_bytes())
            control.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(public), name=name))
        own = policies(home, names) if policies else [""] * nodes
        hosts = start_real(home, address, names, parameters, own) if real else start_light(home, address, names)
        _watch(home, control, superlink, hosts, reading, run_config(nodes, rounds, parameters) | changes)
        reading.failures += failures(home)
    return reading


@contextmanager
def place(names: Sequence[str]) -> Iterator[Path]:
    """Yield a folder with a server's certificates, and the keys of nodes of these names.

    Processes with it as FLWR_HOME end with this.
    """
    with tempfile.TemporaryDirectory(prefix="umbel-benchmark-") as scratch:
        home = Path(scratch)
        (home / "empty").mkdir()  # what lies in a SuperLink's working directory is imported ahead of the app
        nodes = [word for name in names for word in ("--node", name)]
        _umbel("certs", "--server", _HOST, "--out", scratch, "--owner", str(os.getuid()), *nodes)
        try:
            yield home
        finally:
            end(scratch)


def _umbel(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "umbel", *words], check=True, stdout=subprocess.DEVNULL)


def start(home: Path, name: str, *command: str) -> psutil.Process:
    """Start a module of Python with arguments; it logs to a file of that name."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("UMBEL_", "FLWR_"))} | {
        "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "UMBEL_HOME": str(home / "umbel"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(APP),
    }  # fmt: skip
    with (home / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=home / "empty", env=environment, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return psutil.Process(process.pid)


def start_superlink(home: Path, address: str, sqlite: bool) -> psutil.Process:
    """Start the server as it is deployed, and wait for it."""
    process = start(
        home, "superlink", "umbel", "server", "start", "--host", _HOST, "--port", address.rpartition(":")[2],
        "--enable-supernode-auth", "--ssl-ca-certfile", f"{home}/ca.crt", "--ssl-certfile", f"{home}/server.crt",
        "--ssl-keyfile", f"{home}/server.key", "--disable-runtime-dependency-installation",
        *(["--database", f"{home}/state.db"] if sqlite else []),
    )  # fmt: skip
    trusted = ssl.create_default_context(cafile=home / "ca.crt")
    with httpx.Client(verify=trusted, timeout=30) as client:
        for _ in _until(_START_S):
            with suppress(httpx.HTTPError):
                if client.get(f"https://{address}/health").is_success:
                    return process
            if not _lives(process):
                break
    tail = _log(home, "superlink")[-2000:]
    raise RuntimeError(f"the SuperLink did not start; its log ends:\n{tail}")


def start_light(home: Path, address: str, names: Sequence[str]) -> list[psutil.Process]:
    """Start nodes that only answer, some in each process."""
    parts = [names[i : i + _TOGETHER] for i in range(0, len(names), _TOGETHER)]
    light = ("benchmarks.light_nodes", address, f"{home}/ca.crt")
    return [start(home, part[0], *light, *(f"{home}/{name}" for name in part)) for part in parts]


def start_real(
    home: Path, address: str, names: Sequence[str], parameters: int, policies: Sequence[str]
) -> list[psutil.Process]:
    """Start sites, each with a separate ledger."""
    write_site(home / "site", parameters)
    hosts = []
    for name, policy in zip(names, policies, strict=True):
        ledger = f"{home}/{name}.jsonl"
        config = f'data-path="{home}/site" ledger-path="{ledger}" role="split" max-participations=1000 {_POLICY} '
        config += policy
        # A site whose policy limits its clients makes no journal by itself: it might have lost one.
        subprocess.run(
            [sys.executable, "-m", "umbel", "site", "journal", "--create", ledger],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        hosts.append(start(
            home, name, "umbel", "site", "start", "--superlink", address, "--port", str(free_port()),
            "--node-config", config, "--root-certificates", f"{home}/ca.crt",
            "--auth-supernode-private-key", f"{home}/{name}",
        ))  # fmt: skip
    return hosts


def write_site(folder: Path, parameters: int) -> None:
    """Write a dataset of two clients, one of which validates, for a linear model of so many parameters."""
    source, split = np.random.default_rng(0), {"train": 1, "validation": 1}
    manifest = umbel.Manifest(name="site", clients=2, split=split, model=_model(parameters), loss="mse")
    features = source.uniform(-1, 1, (20, parameters - 1)).astype(np.float32)
    umbel.write_dataset(folder, manifest, features, features.mean(axis=1), np.array([0, 10, 20]))


def run_config(nodes: int, rounds: int, parameters: int) -> dict[str, Any]:
    """Return the run config with which all nodes are asked in each round."""
    return {
        "dataset": "", "model": _model(parameters), "loss": "mse", "restarts": 1, "step-size": 0.01, "patience": 0,
        "rounds": rounds, "clients-per-round": nodes, "wait": f"nodes={nodes} seconds={_START_S}",
        "round-timeout": _ROUND_S, "max-participations": 0, "local-epochs": 1, "noise-multiplier": 5.0,
        "choice-epsilon": 0.0, "clipping": "update",
    }  # fmt: skip


def _model(parameters: int) -> str:
    return f"linear inputs={parameters - 1} outputs=1"  # and a bias


def _watch(
    home: Path,
    control: ControlHttpClient,
    superlink: psutil.Process,
    hosts: Sequence[psutil.Process],
    reading: Reading,
    config: Mapping[str, Any],
) -> None:
    """Do a run and note in `reading` what it takes."""
    nodes, rounds = int(config["clients-per-round"]), int(config["rounds"])
    if not any(_online(home) >= nodes for _ in _until(_START_S)):
        reading.failures[f"only {_online(home)} of {nodes} nodes came online"] += 1
        return
    bundle = fab_to_proto(Fab("", build_bundle(APP), {}))
    request = StartRunRequest(fab=bundle, override_config=user_config_to_proto(dict(config)))
    run, began = control.StartRun(request).run_id, time.time()
    first: dict[str, float] = {}  # what each had computed when the first round was over
    done: list[Round] = []
    for turn in _until(_START_S + rounds * _ROUND_S):
        if not _lives(superlink):
            reading.failures["the SuperLink died"] += 1
            break
        used = {name: _used(party) for name, party in zip(_PARTIES, _parties(superlink), strict=False)}
        for name, (_, mib) in used.items():
            reading.memory[name] = max(reading.memory.get(name, 0), mib)
        done = history(home)
        if done and not first:
            first = {name: seconds for name, (seconds, _) in used.items()}
        if len(done) > rounds:  # what a run does at its end is not measured
            reading.cpu = {name: (used[name][0] - seconds) / (rounds - 1) for name, seconds in first.items()}
            break
        if turn % 10 == 0 and (ended := _ended(control, run)):
            reading.failures[ended] += 1
            break
    else:
        reading.failures["the run did not end"] += 1
    for file in (home / "umbel" / "runs").glob("*/config.toml"):
        reading.joined = file.stat().st_mtime - began
    reading.rounds = [one.seconds for one in done[2:]]
    if lost := sum(one.lost_nodes for one in done):
        reading.failures["a node did not answer in a round"] += lost
    family = [one for host in hosts if _lives(host) for one in (host, *host.children(recursive=True))]
    for one in family:
        with suppress(psutil.Error):  # it may just have ended
            reading.node += one.memory_full_info().pss / _MIB / nodes
    reading.database = sum(file.stat().st_size for file in home.glob("state.db*")) / _MIB


def history(home: Path) -> list[Round]:
    """Return the finished rounds of the run, from round 0."""
    return [one for folder in home.glob("umbel/runs/*") for one in RunFolder(folder).read_history()]


def failures(home: Path) -> Counter[str]:
    """Return what the processes logged of what went wrong, without what differs from one time to the next."""
    found: Counter[str] = Counter()
    for file in home.glob("*.log"):
        for line in _log(home, file.stem).splitlines():
            plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
            if match := re.search(rf"^{FAILED}(.*)|ERROR\W+(.*)", plain):
                found[re.sub(r"\b[0-9a-f]{12,}\b|\d{4,}", "...", match[1] or match[2])] += 1
    return found


def _parties(superlink: psutil.Process) -> Iterator[psutil.Process]:
    """Yield the SuperLink, and the ServerApp while it runs."""
    yield superlink
    for one in superlink.children(recursive=True):
        with suppress(psutil.Error):
            if any("flwr-serverapp" in word for word in one.cmdline()):
                yield one
                return


def _used(process: psutil.Process) -> tuple[float, float]:
    """Return the seconds that a process has computed, and the MiB that it has; 0 once it is over."""
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system), process.memory_info().rss / _MIB
    return 0.0, 0.0


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _ended(control: ControlHttpClient, run: int) -> str:
    """Return how a run ended, with Flower's reason; empty while it runs."""
    try:
        status = control.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
    except httpx.HTTPError:  # it has no time to say so
        return ""
    if status.status != "finished":
        return ""
    return f"finished:{status.sub_status}" + (f": {status.details}" if status.details else "")


def _online(home: Path) -> int:
    return sum(_log(home, file.stem).count(ONLINE) for file in home.glob("site-*.log"))


def _log(home: Path, name: str) -> str:
    return (home / f"{name}.log").read_text(encoding="utf-8", errors="replace")


def _until(seconds: float) -> Iterator[int]:
    """Yield how often it was looked, from time to time, until so many seconds have gone by."""
    end, turn = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        yield turn
        time.sleep(_LOOK_S)
        turn += 1


if __name__ == "__main__":
    typer.run(main)
