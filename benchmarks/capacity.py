"""Predict what a round takes from clients, parameters and machines, and check that on two sizes that run here.

    python -m benchmarks.capacity [--clients-per-round 1000 --parameters 25000000 --machines 10 ...] [--out FILE]

Small datasets of artificial rows run in separate processes, one thread each. Each
part of a round is timed in time of a core, and memory is counted above imports. A part is taken for a sum of what
there is of its size (`PARTS`), of which each costs what fits these rounds best. Two sizes to which nothing is fitted
are played among them, and compared with what is predicted of them. Needs Linux.

Clients are divided among nodes, a node a core, and the server is on the first machine and one of its cores. Not in the
sum: what Flower takes to send a byte and to store it; that the cores of a machine share its memory; rows, which are
as many for all clients; and what a processor's caches save where models are small, in which a sum is least right.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from rich.table import Table
from scipy.optimize import nnls

import umbel
from benchmarks.in_process import Laps
from benchmarks.in_process import rounds as rounds_of
from benchmarks.measure import Out, benchmark, console, table_of
from benchmarks.parts import Stopwatch
from benchmarks.scale import apart, memory
from umbel.protocol.errors import ConfigError
from umbel.simulation.in_process import run_config

Network = Literal["mlp", "cnn"]
CNN = 1_206_590
"""Parameters of ``cnn``, for all sizes."""
HOSPITAL = 11
"""Of ``mlp``; a network of more is as wide as it takes."""

PLACES: dict[str, list[str]] = {
    "scoring": ["umbel.client.learner:Learner.score"],
    "training": ["umbel.client.learner:Learner.train"],
    "noise": [f"umbel.privacy.gate.releases:Sanitiser.{name}" for name in ("of", "sanitised")],
    "packing": ["umbel.privacy.gate.own_app:training_reply"],
    "reading": ["umbel.server.nodes.fleet:read_releases"],
    "k-means": ["umbel.strategies.group_privacy:seeded_kmeans"],
    "averages": ["umbel.strategies.base:HypothesisStrategy.learn"],
    "the rest of a node": ["umbel.simulation.grid:answered"],
}


@dataclass(frozen=True)
class Size:
    """The work of a round, and the number of machines. A core of a machine is a node."""

    network: Network
    parameters: int
    clients: int
    validation: int
    rows: int
    hypotheses: int = 2
    epochs: int = 1
    batch: int = 10
    machines: int = 1
    cores: int = 1

    @property
    def nodes(self) -> int:
        """The nodes among which clients are divided."""
        return self.machines * self.cores

    @property
    def of_a_node(self) -> Size:
        """The work of the busiest node."""
        train, validate = (math.ceil(clients / self.nodes) for clients in (self.clients, self.validation))
        return replace(self, clients=train, validation=validate, machines=1, cores=1)

    @property
    def steps(self) -> int:
        """Minibatches of a client."""
        return self.epochs * math.ceil(self.rows / (min(self.batch, self.rows) or self.rows))

    @property
    def releases(self) -> int:
        """Numbers that clients release."""
        return self.clients * self.parameters

    @property
    def sent(self) -> int:
        """Numbers that a node is sent."""
        return self.hypotheses * self.parameters


@dataclass(frozen=True)
class Round:
    """The cost of a round: seconds of a core by part, and bytes at most above imports."""

    seconds: Mapping[str, float]
    memory: float


def write(folder: Path, size: Size) -> None:
    """Write a dataset of made-up rows for a network of about that many parameters."""
    rng, clients = np.random.default_rng(0), size.clients + size.validation
    shape: tuple[int, ...]
    if size.network == "cnn":
        name, shape, classes = "cnn", (28, 28), 62
    elif size.parameters == HOSPITAL:
        name, shape, classes = "mlp", (3,), 0
    else:
        name, shape, classes = f"mlp inputs=64 hidden={size.parameters // 75} outputs=10", (64,), 10
    features = rng.standard_normal((clients * size.rows, *shape), np.float32)
    targets = rng.integers(classes, size=len(features)) if classes else features[:, 0]
    split = {"train": size.clients, "validation": size.validation}
    loss = "cross-entropy" if classes else "rmse"
    manifest = umbel.Manifest(name="capacity", clients=clients, split=split, model=name, loss=loss)
    umbel.write_dataset(folder, manifest, features, targets, np.arange(clients + 1) * size.rows)


def play(size: Size, rounds: int) -> Round:
    """Do rounds of a size in this process; of each part the quickest counts."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="umbel-benchmark-") as scratch:
        write(Path(scratch) / "data", size)
        config = run_config(
            "hospital", dataset=str(Path(scratch) / "data"), rounds=rounds, hypotheses=size.hypotheses,
            clients_per_round=size.clients, validation_clients_per_round=size.validation, local_epochs=size.epochs,
            batch_size=size.batch, step_size=0.05, patience=0,
        )  # fmt: skip
        before, watch = memory()["VmRSS"], Stopwatch(time.process_time)
        notes = Laps(lambda _: {**watch.seconds, "": time.process_time()})
        with watch.watch(PLACES):
            rounds_of(config, notes)
        above = memory()["VmHWM"] - before
    took = [{part: now[part] - then.get(part, 0.0) for part in now} for then, now in pairwise(notes.notes[1:])]
    for one in took:
        whole = one.pop("")
        one["the rest of the server"] = whole - sum(one.values())
    return Round({part: min(one[part] for one in took) for part in took[0]}, above)


_KEPT = 32 << 20  # bytes, from which on an array that is freed goes back to the system (glibc's M_MMAP_THRESHOLD)
_HELD = 3  # what a node holds of each client at the end: trained, released, and packed
_TRAINED = 3  # and in a chunk, as `Learner._training_bytes` counts
CHUNK_BYTES = 1 << 30  # of a chunk on a CPU, as `umbel.client.learner` takes them
_GIB, _MIB = 1 << 30, 1 << 20
NETWORKS: tuple[Network, ...] = ("mlp", "cnn")

QUANTITIES: dict[str, Callable[[Size], float]] = {
    "a round": lambda size: 1.0,
    "a client": lambda size: size.clients + size.validation,
    "a step": lambda size: size.steps,
    "sent": lambda size: size.sent,
    "sent and hypothesis": lambda size: size.sent * size.hypotheses,
    "scored": lambda size: (size.clients + size.validation) * size.rows * size.sent,
    "released": lambda size: size.releases,
    "released and hypothesis": lambda size: size.releases * size.hypotheses,
    "released and row": lambda size: size.releases * size.epochs * size.rows,
    "released and step": lambda size: size.releases * size.steps,
    "kept": lambda size: size.releases * (4 * size.releases < _KEPT),
    "new": lambda size: size.releases * (4 * size.releases >= _KEPT),
    "new and step": lambda size: size.releases * size.steps * (4 * size.releases >= _KEPT),
}
"""Quantities of a size: numbers of its models, for each client or hypothesis, and how often they are computed on.

Arrays are `kept` by C's library when they are freed, or else `new` each time, handed out by the system page by page.
"""

PARTS: dict[str, Sequence[str]] = {
    "scoring": ("a round", "a client", "scored"),
    "training": ("a round", "a client", "a step", "released and row", "released and step", "new and step"),
    "noise": ("a round", "a client", "sent", "released", "new"),
    "packing": ("a round", "released", "new"),
    "the rest of a node": ("a round", "a client", "sent"),
    "reading": ("a round", "sent", "released", "released and hypothesis"),
    "k-means": ("a round", "sent", "released", "released and hypothesis"),
    "averages": ("a round", "sent", "released", "new"),
    "the rest of the server": ("a round", "a client", "sent", "sent and hypothesis"),
    "memory": ("a round", "sent", "released", "kept"),
}
"""The terms of each part's seconds, and of a node's bytes."""

SERVER = ("reading", "k-means", "averages", "the rest of the server")
OF_A_NETWORK = ("scoring", "training", "memory")
"""Terms with a different cost for each network."""

FITTED = (
    Size("mlp", HOSPITAL, 20, 20, 4, batch=0),
    Size("mlp", HOSPITAL, 400, 200, 4, hypotheses=5),
    Size("mlp", 20_000, 20, 10, 20),
    Size("mlp", 300_000, 20, 10, 40, epochs=2, batch=20),
    Size("mlp", 300_000, 10, 10, 20, hypotheses=8),
    Size("mlp", 200_000, 80, 10, 20),
    Size("cnn", CNN, 2, 2, 20),
    Size("cnn", CNN, 4, 2, 40, batch=20),
    Size("cnn", CNN, 3, 6, 30, hypotheses=4, batch=30),
)
CHECKED = (Size("mlp", 100_000, 60, 20, 30, hypotheses=3), Size("cnn", CNN, 8, 4, 50))
"""Of other sizes than anything that is fitted."""


Costs = Mapping[tuple[str, Network], Sequence[float]]
"""The cost of one of each of a part's quantities."""


def fit(rounds: Mapping[Size, Round]) -> Costs:
    """Return the costs, none below 0, that are least wrong in shares of what was measured."""
    costs: dict[tuple[str, Network], Sequence[float]] = {}
    for part, names in PARTS.items():
        for network in NETWORKS:
            # The smallest sizes say what is fixed of either network.
            mine = [s for s in rounds if part not in OF_A_NETWORK or network == s.network or s.parameters == HOSPITAL]
            took = np.array([rounds[s].memory if part == "memory" else rounds[s].seconds[part] for s in mine])
            took = np.maximum(
                took, max(1e-6 * took.max(), 1e-9)
            )  # a small size may have taken no more than others before
            table = np.array([[QUANTITIES[name](s) for name in names] for s in mine])
            scale = np.maximum(np.abs(table).max(axis=0), 1e-300)
            costs[part, network] = (nnls(table / scale / took[:, None], np.ones(len(mine)))[0] / scale).tolist()
    return costs


def cost(costs: Costs, part: str, size: Size) -> float:
    """Return what a part of a round takes of a size."""
    each = costs[part, size.network]
    return sum(one * QUANTITIES[name](size) for one, name in zip(each, PARTS[part], strict=True))


@dataclass(frozen=True)
class Forecast:
    """The estimated cost of a round: seconds of its parts and whole, and bytes."""

    clients: float
    network: float
    server: float
    seconds: float
    node_bytes: float
    server_bytes: float
    sent_bytes: float


def forecast(costs: Costs, size: Size, bandwidth: float = math.inf, wait: float = 0.0) -> Forecast:
    """Return what a round takes whose server is on the first machine, with `bandwidth` in Gbit/s to the others."""
    node, away = size.of_a_node, 1 - 1 / size.machines
    sent = 4 * (size.nodes * size.sent + size.releases)
    start, per_sent, *_ = costs["memory", size.network]
    # All that was answered, and of several nodes the same in the order of clients.
    held = 4 * size.releases * (1 + (size.nodes > 1))
    clients = sum(cost(costs, part, node) for part in PARTS if part not in (*SERVER, "memory"))
    server = sum(cost(costs, part, size) for part in SERVER)
    network = 8e-9 * sent * away / bandwidth
    server_bytes = start + held + per_sent * size.sent
    whole = clients + network + server + wait
    return Forecast(clients, network, server, whole, memory_of(costs, node), server_bytes, sent)


def memory_of(costs: Costs, size: Size) -> float:
    """Return a node's bytes: as fitted, but that only so many clients are trained at once as a chunk holds."""
    start, per_sent, per_release, kept = costs["memory", size.network]
    at_once = min(size.releases, CHUNK_BYTES / (4 * _TRAINED))
    trains = 4 * size.releases + (per_release - 4) * at_once
    return start + per_sent * size.sent + max(trains, 4 * _HELD * size.releases) + kept * QUANTITIES["kept"](size)


TYPICAL = (
    Size("mlp", HOSPITAL, 100, 200, 4, hypotheses=5),
    Size("cnn", CNN, 100, 20, 200, epochs=5),
    *(Size("mlp", 25_000_000, 1000, 50, 100, machines=machines) for machines in (1, 10, 100)),
)
MATRICES = ((100, 10**6), (1000, 10**6), (100, 25 * 10**6), (1000, 25 * 10**6), (1000, 10**9))


_NOTHING = Size("mlp", 0, 100, 20, 100)  # what is asked by default


def main(
    clients_per_round: Annotated[int, typer.Option(min=1, help="Training clients asked in a round.")] = 100,
    validation_clients: Annotated[int, typer.Option(min=0, help="Validation clients asked in a round.")] = 20,
    parameters: Annotated[int, typer.Option(min=0, help="Of the network; 0 for a table of a few sizes.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Of a client.")] = 100,
    hypotheses: Annotated[int, typer.Option(min=1, help="k.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Over a client's rows.")] = 1,
    batch: Annotated[int, typer.Option(min=0, help="Rows of a minibatch; 0 for all.")] = 10,
    network: Annotated[
        Network, typer.Option(help="Network with the same cost for each parameter: mlp or cnn.")
    ] = "mlp",
    machines: Annotated[int, typer.Option(min=1, help="Among which clients are divided.")] = 1,
    cores: Annotated[int, typer.Option(min=1, help="Of a machine, each a node.")] = 1,
    bandwidth: Annotated[float, typer.Option(help="Of the server's network, in Gbit/s; inf to leave it out.")] = 10.0,
    wait: Annotated[float, typer.Option(min=0, help="Seconds that Flower waits in a round.")] = 0.0,
    price: Annotated[float | None, typer.Option(min=0, help="Dollars an hour and machine.")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each size that is measured.")] = 4,
    times: Annotated[int, typer.Option(min=1, help="Turns of all sizes.")] = 2,
    out: Out = None,
) -> None:
    """Print what is predicted, and how far predictions are from what two sizes take here."""
    asked = Size(network, parameters, clients_per_round, validation_clients, rows, hypotheses, epochs, batch, machines)
    with benchmark(out):
        if not parameters and asked != _NOTHING:
            raise ConfigError("give --parameters as well: the network's number of them", code="config.bad-option")
        if not bandwidth > 0:
            raise ConfigError(f"--bandwidth must be above 0 Gbit/s, got {bandwidth:g}", code="config.bad-option")
        sizes = [replace(size, cores=cores) for size in ([asked] if parameters else TYPICAL)]
        # Checked among the others, so that what else the machine does falls on both alike.
        order = [*FITTED[::2], *CHECKED, *FITTED[1::2]]
        turns = [{size: apart(play, size, rounds) for size in order} for _ in range(times)]
        measured = {size: quickest([turn[size] for turn in turns]) for size in order}
        costs = fit({size: measured[size] for size in FITTED})
        console.print(predictions(costs, sizes, bandwidth, wait, price))
        console.print(comparison(costs, {size: measured[size] for size in CHECKED}))
        if not parameters:
            console.print(matrices(costs))


def quickest(rounds: Sequence[Round]) -> Round:
    """Return the least that each part took, since others on the machine only make it longer, and the most memory."""
    seconds = {part: min(one.seconds[part] for one in rounds) for part in rounds[0].seconds}
    return Round(seconds, max(one.memory for one in rounds))


def predictions(costs: Costs, sizes: Sequence[Size], bandwidth: float, wait: float, price: float | None) -> Table:
    """Return the table of what sizes take."""
    title = f"A round with {bandwidth:g} Gbit/s to the server: seconds by parts, and what it holds and sends"
    headings = ["clients", "M parameters", "k", "machines", "s clients", "s network", "s server", "s all"]
    headings += ["GiB a machine", "GiB server", "GiB sent", *([] if price is None else ["dollars a round"])]
    rows = []
    for size in sizes:
        one = forecast(costs, size, bandwidth, wait)
        row = [f"{size.clients:,}", short(size.parameters / 1e6), str(size.hypotheses)]
        row += [f"{size.machines} x {size.cores}", *map(short, (one.clients, one.network, one.server, one.seconds))]
        row += [short(count / _GIB) for count in (size.cores * one.node_bytes, one.server_bytes, one.sent_bytes)]
        rows.append([*row, *([] if price is None else [short(size.machines * price * one.seconds / 3600)])])
    return table_of(title, headings, rows)


def comparison(costs: Costs, measured: Mapping[Size, Round]) -> Table:
    """Return the table of what was predicted of sizes in one process, and what they took."""
    rows = []
    for size, one in measured.items():
        said, took = forecast(costs, size), sum(one.seconds.values())
        row = [f"{size.network}, {size.clients} clients, {size.parameters:,} parameters", short(said.seconds)]
        row += [short(took), _ratio(said.seconds, took), short(said.node_bytes / _MIB)]
        rows.append([*row, short(one.memory / _MIB), _ratio(said.node_bytes, one.memory)])
    headings = ["", "s, predicted", "measured", "ratio", "MiB, predicted", "measured", "ratio"]
    return table_of("Sizes to which nothing was fitted, in one process", headings, rows)


def _ratio(said: float, took: float) -> str:
    """Return a ratio as text; a small size may have taken no more memory than others before."""
    return f"{said / took:.2f}" if took else "-"


def matrices(costs: Costs) -> Table:
    """Return the table of what releases take of the server, as a matrix of clients and parameters."""
    rows = []
    for clients, parameters in MATRICES:
        size = Size("mlp", parameters, clients, 0, 1)
        # A k-means that changes no label looks for the nearest twice and computes the means once.
        seconds = [cost(costs, "k-means", size), sum(cost(costs, part, size) for part in SERVER)]
        rows.append([f"{clients:,} x {parameters:,}", short(4 * size.releases / _GIB), *map(short, seconds)])
    return table_of("The server's matrix, k = 2", ["releases", "GiB", "s, k-means", "s, the server"], rows)


def short(number: float) -> str:
    """Return a number in three digits, or all that are before the point."""
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:,.0f}"


if __name__ == "__main__":
    typer.run(main)
