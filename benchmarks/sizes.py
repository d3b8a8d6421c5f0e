"""Rounds of a size that is asked for, on made-up rows, timed part by part in time of a core."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

import umbel
from benchmarks.in_process import Laps
from benchmarks.in_process import rounds as rounds_of
from benchmarks.parts import Stopwatch
from benchmarks.scale import memory
from umbel.simulation.in_process import run_config

Network = Literal["mlp", "cnn"]
CNN = 1_206_590
"""Parameters of ``cnn``, whatever a size says."""
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
    """What a round asks, and of how many machines. A core of a machine is a node."""

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
        """What the busiest node does."""
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
    """What a round took: seconds of a core by part, and bytes at most above imports."""

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
