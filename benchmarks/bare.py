"""Time umbel in process against a loop of plain PyTorch that does the same rounds.

    python -m benchmarks.bare [--rounds N] [--times N] [--task hospital,cnn] [--out FILE]

Both start from the same hypotheses and ask the same clients. Without noise their losses in the hospital task are the
same up to rounding, until a client whose choice depends on the last bit chooses another hypothesis; images are shuffled
separately. umbel's rounds are complete: messages, gate, ledger, strategy. In the hospital task `examples/algorithm.py`
takes a third turn: Algorithm 1, client by client. With the CNN the third is the bare loop with kernels in umbel's own
layout, channels last, so that what umbel adds is not hidden by a layout that anybody can take.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks import bare_loops, in_process
from benchmarks.measure import Out, Ratio, Reading, Times, benchmark, console, interleave, show
from benchmarks.peers.tasks import TASKS, brief_of, named

ROUNDS = {"hospital": 100, "cnn": 5}
SAME = 5  # later a client whose choice hangs on the last bit has chosen otherwise


def main(
    rounds: Annotated[int, typer.Option(min=0, help="Of a go; 0 for the task's own number.")] = 0,
    times: Times = 7,
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
    brief, count = brief_of(config), int(config["rounds"])

    def timed(play: Callable[[float], list[float]], nu: float) -> tuple[float, list[float]]:
        began = time.perf_counter()
        losses = play(nu)
        return time.perf_counter() - began, losses

    players: dict[str, Callable[[float], tuple[float, list[float]]]] = {
        "bare loop": partial(timed, partial(bare_loops.play, bare_loops.LOOPS[task](brief), brief)),
        "umbel": lambda nu: in_process.rounds({**config, "noise-multiplier": nu}),
    }
    if task == "cnn":
        loop = bare_loops.CNN(brief, torch.channels_last)
        players["bare loop, channels last"] = partial(timed, partial(bare_loops.play, loop, brief))
    if by_client:
        players["algorithm.py"] = partial(timed, partial(bare_loops.by_client, brief))
    history: dict[tuple[str, float], list[float]] = {}

    def go(name: str, nu: float) -> Reading:
        seconds, history[name, nu] = players[name](nu)
        return Reading(seconds / count, history[name, nu][-1])

    contestants = {f"{name}, {f'nu = {nu:g}' if nu else 'no noise'}": partial(go, name, nu)
                   for nu in (float(config["noise-multiplier"]), 0.0) for name in players}  # fmt: skip
    readings = interleave(contestants, times)
    title = f"{task}: {config['clients-per-round']} clients train in each of {count} rounds, k = {config['hypotheses']}"
    show(title, readings, next(iter(contestants)))
    first = min(SAME, count)
    for name in (name for name in players if name != "umbel"):
        apart = np.abs(np.subtract(history["umbel", 0.0], history[name, 0.0]))[:first].max()
        console.print(
            f"Without noise the losses of umbel and {name} in the first {first} rounds differ by {apart:.1e} at most."
        )
    bare, umbel, *_ = readings.values()
    return Ratio.of(umbel, bare)


if __name__ == "__main__":
    typer.run(main)
