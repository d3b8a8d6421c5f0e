"""Time umbel against plain Flower: one algorithm, one Ray engine, the hospital's 2947 clients.

    python -m benchmarks.peers.plain_flower [--rounds 5] [--times 2] [--out FILE]

The plain app (`benchmarks/peers/plain`) is written as Flower's quickstarts are: a SuperNode and a message for each
client. umbel's app runs by ``flwr run`` too, with two SuperNodes that host all clients. A round is 100 clients
that train, aggregation, and 200 that validate, timed within each ServerApp; what umbel then writes to its folder is not
in it. A plain SuperNode has one CPU, so that all cores work.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.flower import history_of, simulation
from benchmarks.measure import Out, Ratio, Reading, benchmark, console, interleave, show
from benchmarks.peers.rivals import Peer, environment
from benchmarks.peers.tasks import hospital
from umbel.data import find_dataset, open_dataset, write_dataset
from umbel.protocol.run_config import Validation

PLAIN = Path(__file__).parent / "plain"
PEER = Peer("plain", ("3.11", "3.12", "3.13"), {}, "the gate, the policy and the ledger")
# Names that both apps share.
_SHARED = ("hypotheses", "noise-multiplier", "clients-per-round", "step-size", "rounds")


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each run.")] = 5,
    times: Annotated[int, typer.Option(min=1, help="Runs of each, after one to warm up.")] = 2,
    out: Out = None,
) -> None:
    """Print what a round takes, what was learnt, and how long each took to start."""
    with benchmark(out, "ray"):
        compare(rounds, times)


def compare(rounds: int, times: int) -> Ratio:
    """Run both in turns, print what they took, and return how many times as long as umbel plain Flower takes."""
    config = hospital() | {"rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="umbel-benchmark-") as folder:
        data = Path(folder) / "hospital"
        found = open_dataset(find_dataset(str(config["dataset"])))
        # As arrays, which plain Flower's app reads.
        write_dataset(data, found.manifest, found.features, found.targets, found.offsets, found.names)
        return _compare(config, data, rounds, times)


def _compare(config: dict[str, Any], data: Path, rounds: int, times: int) -> Ratio:
    # Flower finds the program that runs the app on the path, and with it the app's environment.
    path = os.pathsep.join([str(environment(PEER).parent), os.environ["PATH"]])
    startups: dict[str, list[float]] = {"umbel": [], "plain Flower": []}

    def umbels() -> Reading:
        history, startup = history_of(config | {"seed": len(startups["umbel"])}, nodes=2)
        startups["umbel"].append(startup)
        return reading(history)

    def plain() -> Reading:
        with tempfile.TemporaryDirectory(prefix="umbel-benchmark-") as scratch:
            results, began = Path(scratch, "plain.json"), time.time()
            with simulation({"PATH": path}) as flower:
                values = plain_config(config, data, results) | {"seed": len(startups["plain Flower"])}
                flower.run(PLAIN, values, clients_in(data))
            found = json.loads(results.read_text(encoding="utf-8"))
        startups["plain Flower"].append(found["began"] - began)
        return reading(found["rounds"])

    readings = interleave({"umbel": umbels, "plain Flower": plain}, times)
    title = f"A round of the hospital in Ray, {clients_in(data)} clients, and the best RMSE in {rounds} rounds"
    show(title, readings, "umbel")
    for name, ones in startups.items():
        console.print(f"{name} took {statistics.median(ones[1:]):.1f} s from its start to its first round")
    return Ratio.of(readings["plain Flower"], readings["umbel"])


def clients_in(data: Path) -> int:
    """Return the number of clients of a dataset in a folder."""
    return len(np.load(data / "offsets.npy", mmap_mode="r")) - 1


def plain_config(config: dict[str, Any], data: Path, results: Path) -> dict[str, Any]:
    """Return the plain app's run config for what umbel's says."""
    clients = Validation.read(str(config["validation"]), "validation").clients
    own = {"validation-clients-per-round": clients, "data": str(data), "results": str(results)}
    return {key: config[key] for key in _SHARED} | own


def reading(rounds: list[dict[str, Any]]) -> Reading:
    """Return the median time of the rounds that trained and the least loss of all."""
    return Reading(
        statistics.median(one["seconds"] for one in rounds if one.get("asked", True)),
        min(one["loss"] for one in rounds),
    )


if __name__ == "__main__":
    typer.run(main)
