"""Time umbel on datasets of a thousand to a million clients, of which a round always asks as many.

    python -m benchmarks.scale [--sizes 1000,10000,100000,1000000] [--rounds 500] [--times 3] [--out FILE]

Each dataset is written as a folder of the hospital's shape. Each run is a whole one in a separate process, and
leaves the folder that any run leaves; a round's time is from its start to the next round's, so that writing to that
folder is in it. The time of a core is shown beside it: the rest is waiting, for the disk above all. A second table
compares the first tenth of a run's rounds with the last, in means, since some things are written only now and then.
Opening is from the run's start, with nothing open, to its first round. Memory is counted above what the process holds
after its imports; of it, mapped pages are those of the dataset's files that were read, which the system takes back
when it needs memory. One thread computes. Needs Linux.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
import typer
from rich.table import Table
from threadpoolctl import threadpool_limits

import umbel
from benchmarks.in_process import Laps
from benchmarks.measure import Out, Ratio, Reading, benchmark, console, interleave, table_of
from umbel.simulation.in_process import run as run_here
from umbel.simulation.in_process import run_config

_MIB = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """The cost of a run.

    Attributes
    ----------
    opening : float
        Seconds until the node had said what it hosts, and hypotheses were drawn.
    rounds, cpu : list of float
        Seconds of each round but the first, which warms up, and the last; of these, how many the process computed.
    loss : float
        The lowest of the validation losses.
    memory, mapped : float
        MiB at the most, until the last round began; of the dataset's files in that memory.
    """

    opening: float
    rounds: list[float]
    cpu: list[float]
    loss: float
    memory: float
    mapped: float


def main(
    sizes: Annotated[str, typer.Option(help="Numbers of clients, the one to compare with first.")] = (
        "1000,10000,100000,1000000"
    ),
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each run.")] = 500,
    times: Annotated[int, typer.Option(min=1, help="Runs of each size, after one to warm up.")] = 3,
    out: Out = None,
) -> None:
    """Print seconds and memory of each size."""
    with benchmark(out):
        measure([int(size) for size in sizes.split(",")], rounds, times)


def measure(counts: Sequence[int], rounds: int, times: int) -> tuple[Ratio, Ratio]:
    """Time runs of each size, print what they took, and return two ratios of the last size, in time of a core.

    How many times as long as with the first size a round takes, and the last rounds as the first ones.
    """
    runs: dict[int, list[Run]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory(prefix="umbel-benchmark-") as scratch:
        for count in counts:
            apart(write, Path(scratch) / str(count), count)

        def go(count: int) -> Reading:
            runs[count].append(run := apart(play, Path(scratch) / str(count), rounds))
            return Reading(statistics.median(run.rounds))

        interleave({str(count): partial(go, count) for count in counts}, times)
    runs = {count: ones[1:] for count, ones in runs.items()}
    headings = ["clients", "s to open", "ms a round", f"times {counts[0]:,}", "ms of a core", f"times {counts[0]:,}"]
    table = table_of(
        "A dataset of so many clients, of which a round asks 300", [*headings, "MiB at most", "of it mapped", "loss"]
    )
    for count, ones in runs.items():
        row = [f"{count:,}", f"{statistics.median(run.opening for run in ones):.3f}"]
        for what in ("rounds", "cpu"):
            own, base = (median(getattr(run, what) for run in many) for many in (ones, runs[counts[0]]))
            row += [f"{1e3 * own:.2f}", f"{own / base:.2f}"]
        row += [f"{max(run.memory for run in ones):.1f}", f"{max(run.mapped for run in ones):.1f}"]
        table.add_row(*row, f"{ones[0].loss:.6f}")
    console.print(table)
    console.print(ends(runs))
    few, many = runs[counts[0]], runs[counts[-1]]
    return (
        Ratio.of(*([Reading(statistics.median(run.cpu)) for run in ones] for ones in (many, few))),
        Ratio.of(*([Reading(tenths(run.cpu)[i]) for run in many] for i in (1, 0))),
    )


def ends(runs: Mapping[int, Sequence[Run]]) -> Table:
    """Return the table of the first and the last tenth of the rounds, by numbers of clients."""
    headings = ("clients", "ms at first", "ms at last", "times", "ms of a core at first", "at last", "times")
    table = table_of("The first and the last tenth of a run's rounds", headings)
    for clients, ones in runs.items():
        row = []
        for both in ([tenths(run.rounds) for run in ones], [tenths(run.cpu) for run in ones]):
            row += [f"{1e3 * statistics.median(part):.2f}" for part in zip(*both, strict=True)]
            row.append(f"{statistics.median(last / first for first, last in both):.2f}")
        table.add_row(f"{clients:,}", *row)
    return table


def median(runs: Iterable[Sequence[float]]) -> float:
    """Return the median of some runs of the medians of their rounds."""
    return statistics.median(map(statistics.median, runs))


def tenths(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the first tenth of some times, and of the last."""
    size = math.ceil(len(seconds) / 10)
    return statistics.mean(seconds[:size]), statistics.mean(seconds[-size:])


def apart(work: Callable[..., T], *args: Any) -> T:
    """Do some work in a new process, on one thread."""
    with ProcessPoolExecutor(1, get_context("spawn"), _one_thread) as pool:
        return pool.submit(work, *args).result()


def _one_thread() -> None:
    torch.set_num_threads(1)
    threadpool_limits(1)  # of NumPy's libraries


def write(folder: Path, clients: int, seed: int = 0) -> None:
    """Write a dataset of the hospital's shape: one to four rows a client, seven clients in ten train."""
    rng = np.random.default_rng(seed)
    train = clients * 7 // 10
    split = {"train": train, "validation": clients - train}
    manifest = umbel.Manifest(name="scale", clients=clients, split=split, model="mlp", loss="rmse")
    offsets = np.append(0, np.cumsum(rng.choice(4, clients, p=[0.03, 0.03, 0.08, 0.86]) + 1))
    features = rng.standard_normal((int(offsets[-1]), 3), np.float32)
    # Two kinds of clients, so that there is something to learn.
    kinds = np.repeat(rng.integers(2, size=clients), np.diff(offsets))
    targets = np.where(kinds, features[:, 0], features[:, 1] + 1).astype(np.float32)
    umbel.write_dataset(folder, manifest, features, targets, offsets)
    for path in folder.iterdir():
        # On the disk before anything is timed, or the rounds would wait while it is written.
        with path.open("rb") as file:
            os.fsync(file.fileno())


def play(folder: Path, rounds: int) -> Run:
    """Do a run on the dataset in `folder`, and return what it took."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=folder.parent) as home:
        os.environ["UMBEL_HOME"] = home
        config = run_config("hospital", dataset=str(folder), rounds=rounds, patience=0)
        before, began = memory()["VmRSS"], time.perf_counter()
        laps = Laps(lambda run: (time.perf_counter(), time.process_time(), memory()["VmHWM"], run.state))
        run_here(config, observers=[laps])
    (opened, *_), *notes = laps.notes
    wall, cpu, most, (state, *_) = zip(*notes, strict=True)
    return Run(
        opening=opened - began,
        rounds=np.diff(wall)[1:].tolist(),
        cpu=np.diff(cpu)[1:].tolist(),
        loss=state.best_loss,
        memory=(most[-1] - before) / _MIB,
        mapped=mapped(folder) / _MIB,
    )


def memory() -> dict[str, float]:
    """Return what Linux says of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): 1024 * float(number) for name, number, _ in fields}


def mapped(folder: Path) -> float:
    """Return how much of the files in `folder` this process has in memory, in bytes."""
    total, inside = 0.0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ", 1)[0]:  # a mapping's first line: its addresses, and at the end its file
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += 1024 * float(line.split()[1])
    return total


if __name__ == "__main__":
    typer.run(main)
