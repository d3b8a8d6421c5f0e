"""Time umbel and its peers on the same tasks, in turns.

    python -m benchmarks.peers [--rounds N] [--times N] [--task hospital] [--only fedjax,pfl] [--out FILE]

The first time it installs each peer in a virtual environment under $UMBEL_HOME/peers. Start-up,
reading of data and compilation are not measured. The hospital task needs its dataset
(datasets/hospital.py).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.measure import Out, benchmark, console
from benchmarks.peers.contest import absent, compare
from benchmarks.peers.rivals import PEERS, Absent, environment
from benchmarks.peers.tasks import TASKS, named
from umbel.protocol.errors import ConfigError


def main(
    rounds: Annotated[int, typer.Option(min=0, help="Of a go; 0 for the task's own number.")] = 0,
    times: Annotated[int, typer.Option(min=1, help="Goes of each contestant that count.")] = 5,
    only: Annotated[str, typer.Option(help="Peers, separated by commas; none with 'umbel'.")] = ",".join(PEERS),
    task: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = ",".join(TASKS),
    cores: Annotated[int, typer.Option(min=1, help="That each contestant may use.")] = 1,
    out: Out = None,
) -> None:
    """Print a table for each task, and what each peer leaves out."""
    peers = [PEERS[name] for name in only.split(",") if name in PEERS]
    if unknown := set(only.split(",")) - PEERS.keys() - {"umbel"}:
        raise typer.BadParameter(f"unknown {', '.join(unknown)}; there are {', '.join(PEERS)}")
    # Children inherit it, and libraries make no more threads than cores they see.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    with benchmark(out, threads=cores):
        tasks = named(task)
        console.print(*(peer.version for peer in peers), sep=", ", highlight=False)
        pythons: dict[str, Path] = {}
        for peer in peers:
            try:
                pythons[peer.name] = environment(peer)
            except Absent as reason:
                absent(peer, reason)
        for one in tasks:
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    config = TASKS[one](Path(scratch))
                    compare(one, config | ({"rounds": rounds} if rounds else {}), pythons, Path(scratch), times, cores)
                except ConfigError as error:
                    console.print(f"{one}: not measured: {error}", highlight=False)
        for peer in peers:
            console.print(f"{peer.version} leaves out: {peer.lacks}.", highlight=False)


if __name__ == "__main__":
    typer.run(main)
