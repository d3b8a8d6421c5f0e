"""Time umbel and its peers on the same tasks, in turns.

    python -m benchmarks.peers [--rounds N] [--times N] [--task hospital] [--only fedjax,pfl] [--out FILE]

The first time it installs each peer in a virtual environment under $UMBEL_HOME/peers. Start-up,
reading of data and compilation are not measured. The hospital task needs its dataset
(datasets/hospital.py).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.measure import Out, benchmark, console, machine
from benchmarks.peers.contest import absent, compare
from benchmarks.peers.rivals import PEERS, environment
from benchmarks.peers.tasks import TASKS
from umbel.protocol.errors import Absent, ConfigError


def main(
    rounds: Annotated[int, typer.Option(min=0, help="Of a go; 0 for the task's own number.")] = 0,
    times: Annotated[int, typer.Option(min=1, help="Goes of each contestant that count.")] = 5,
    only: Annotated[str, typer.Option(help="Peers, separated by commas; none with 'umbel'.")] = ",".join(PEERS),
    task: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = ",".join(TASKS),
    cores: Annotated[int, typer.Option(min=1, help="That each contestant may use.")] = 1,
    out: Out = None,
) -> None:
    """Print a table for each task, and what each peer leaves out."""
    names = [name for name in only.split(",") if name != "umbel"]
    if unknown := [*(set(names) - set(PEERS)), *(set(task.split(",")) - set(TASKS))]:
        raise typer.BadParameter(f"unknown {', '.join(unknown)}; there are {', '.join([*PEERS, *TASKS])}")
    with benchmark(out):
        measure(names, task.split(","), rounds, times, cores)


def measure(names: Sequence[str], tasks: Sequence[str], rounds: int, times: int, cores: int) -> None:
    """Let umbel and the named peers do each task, and print what they took."""
    # Children inherit it, and libraries make no more threads than cores they see.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    torch.set_num_threads(cores)
    console.print(machine(), *(PEERS[name].version for name in names), sep=", ", highlight=False)
    pythons: dict[str, Path] = {}
    for name in names:
        try:
            pythons[name] = environment(name, PEERS[name])
        except Absent as reason:
            absent(name, reason)
    for one in tasks:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                config = TASKS[one](Path(scratch))
                compare(one, config | ({"rounds": rounds} if rounds else {}), pythons, Path(scratch), times, cores)
            except ConfigError as error:
                console.print(f"{one}: not measured: {error}", highlight=False)
    for name in names:
        console.print(f"{PEERS[name].version} leaves out: {PEERS[name].lacks}.", highlight=False)


if __name__ == "__main__":
    typer.run(main)
