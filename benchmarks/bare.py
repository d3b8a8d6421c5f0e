"""Time umbel in process against a loop of plain PyTorch that does the same rounds.

    python -m benchmarks.bare [--rounds N] [--times N] [--task hospital,cnn] [--out FILE]

Both start from the same hypotheses and ask the same clients, so that without noise their losses are
the same to rounding until a client whose choice hangs on the last bit chooses otherwise. umbel's rounds
are whole: messages, gate, ledger, strategy. The hospital task needs its dataset
(datasets/hospital.py). There `examples/algorithm.py` takes a third turn: Algorithm 1, client by client.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks import bare_algorithm, bare_cnn, bare_hospital, in_process
from benchmarks.measure import Out, Ratio, Reading, benchmark, console, interleave, show
from benchmarks.peers.brief import Brief
from benchmarks.peers.tasks import TASKS, brief_of, named
from umbel.client.cohort import LocalUpdate, Schedule
from umbel.privacy.gate.randomness import streams

ROUNDS = {"hospital": 100, "cnn": 5}
Prepare = Callable[[float], Callable[[], list[float]]]
"""From a noise multiplier to what does the rounds and returns their losses; reading of data is not measured."""

SAME = 5  # later a client whose choice hangs on the last bit has chosen otherwise


def main(
    rounds: Annotated[int, typer.Option(min=0, help="Of a go; 0 for the task's own number.")] = 0,
    times: Annotated[int, typer.Option(min=1, help="Goes of each contestant that count.")] = 7,
    task: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = ",".join(TASKS),
    out: Out = None,
) -> None:
    """Print a table for each task."""
    with benchmark(out):
        for name in named(task):
            measure(name, times, rounds, by_client=name == "hospital")


def measure(task: str, times: int, rounds: int = 0, by_client: bool = False) -> Ratio:
    """Time a task, print what all took, and return how many times as long as the bare loop umbel takes, with noise.

    With `by_client`, `examples/algorithm.py` takes part, which takes about 30 times as long as the bare loop.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # Noise on the whole vector, which the bare loop of both tasks adds.
        config = TASKS[task](Path(scratch)) | {"rounds": rounds or ROUNDS[task], "noise-per": "vector"}
        return compare(task, config, times, by_client)


def compare(task: str, config: Mapping[str, Any], times: int, by_client: bool = False) -> Ratio:
    """Let all do a task in turns, print what they took, and return the ratio of the first two."""
    loops: dict[str, Prepare] = {
        "bare loop": bare_loop(task, config),
        "umbel": lambda nu: in_process.prepare({**config, "noise-multiplier": nu}),
    }
    if by_client:
        brief = brief_of(config)
        loops["algorithm.py"] = lambda nu: partial(bare_algorithm.play, brief, nu)
    history: dict[tuple[str, float], list[float]] = {}

    def contestant(name: str, nu: float) -> Callable[[], Reading]:
        def go() -> Reading:
            rounds = loops[name](nu)
            began = time.perf_counter()
            history[name, nu] = rounds()
            return Reading((time.perf_counter() - began) / int(config["rounds"]), history[name, nu][-1])

        return go

    multipliers = (float(config["noise-multiplier"]), 0.0)
    contestants = {f"{name}, {f'nu = {nu:g}' if nu else 'no noise'}": contestant(name, nu)
                   for nu in multipliers for name in loops}  # fmt: skip
    readings = interleave(contestants, times)
    asked = config["clients-per-round"]
    title = f"{task}: {asked} clients train in each of {config['rounds']} rounds, k = {config['hypotheses']}"
    show(title, readings, next(iter(contestants)))
    first = min(SAME, int(config["rounds"]))
    for name in (name for name in loops if name != "umbel"):
        apart = np.abs(np.array(history["umbel", 0.0]) - np.array(history[name, 0.0]))[:first].max()
        console.print(
            f"Without noise the losses of umbel and {name} in the first {first} rounds differ by {apart:.1e} at most."
        )
    loop, umbel, *_ = readings.values()
    return Ratio.of(umbel, loop)


def bare_loop(task: str, config: Mapping[str, Any]) -> Prepare:
    """Return what plays the task by the bare loop."""
    brief = brief_of(config)
    if task == "hospital":
        data = bare_hospital.Data.pad(brief.features, brief.targets, brief.offsets)
        return lambda nu: partial(bare_hospital.play, brief, data, nu)
    orders = orders_of(brief, int(config["seed"]))
    return lambda nu: partial(bare_cnn.play, brief, orders, nu)


def orders_of(brief: Brief, seed: int) -> list[list[NDArray[np.int64]]]:
    """Return how each client that umbel asks goes through its rows, as umbel draws it."""
    settings, orders = brief.settings, []
    update = LocalUpdate(settings.local_epochs, settings.step_size, settings.batch_size)
    for number, clients in enumerate(settings.train, 1):
        lengths = brief.lengths[clients]
        schedule = Schedule.shuffled(lengths, update, streams(seed, "shuffle", number, clients))
        starts = np.cumsum(lengths) - lengths
        orders.append([np.stack([*schedule.passes(c)]) - start for c, start in enumerate(starts)])
    return orders


if __name__ == "__main__":
    typer.run(main)
