"""Time umbel and its peers on the same tasks, in turns.

    python -m benchmarks.peers [--rounds N] [--times N] [--task hospital] [--only fedjax,pfl] [--out FILE]

The first time it installs each peer in a virtual environment under $UMBEL_HOME/peers. Start-up,
reading of data and compilation are not measured. The hospital task needs its dataset
(datasets/hospital.py).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import in_process
from benchmarks.measure import Out, Ratio, Reading, Times, benchmark, console, interleave, show
from benchmarks.peers.rivals import PEERS, Absent, Peer, Rival, environment
from benchmarks.peers.tasks import TASKS, brief_of, named
from umbel.protocol.errors import ConfigError

# umbel as it is, and with as much left out as each peer leaves out.
OURS: dict[str, dict[str, Any]] = {
    "umbel": {},
    "umbel, no noise": {"noise-multiplier": 0.0},
    "umbel, IFCA, no noise": {"strategy": "ifca", "noise-multiplier": 0.0},
    "umbel, FedAvg": {"strategy": "fedavg"},
    "umbel, FedAvg, no noise": {"strategy": "fedavg", "noise-multiplier": 0.0},
}


def main(
    rounds: Annotated[int, typer.Option(min=0, help="Of a go; 0 for the task's own number.")] = 0,
    times: Times = 5,
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


def compare(
    task: str, config: Mapping[str, Any], pythons: Mapping[str, Path], folder: Path, times: int, cores: int
) -> None:
    """Let umbel and the peers do a task in turns, and print what they took."""
    brief = brief_of(config, cores)
    brief.write(folder)
    contestants: dict[str, Callable[[], Reading]] = {
        name: partial(in_process.go, {**config, **changes}) for name, changes in OURS.items()
    }
    alike: dict[str, str] = {}
    with ExitStack() as processes:
        for name, python in pythons.items():
            for variant, (title, like) in PEERS[name].contestants.items():
                rival = Rival(python, name, variant, folder, cores)
                processes.callback(rival.stop)
                try:
                    rival.go()  # a rival that fails is out, and the others continue
                except Absent as reason:
                    absent(PEERS[name], reason)
                else:
                    contestants[title], alike[title] = rival.go, like
        readings = interleave(contestants, times)
    train, validate = len(brief.settings.train[0]), len(brief.settings.validate[0])
    title = f"{task}: {train} clients train and {validate} validate in each of {brief.rounds} rounds, k = {brief.k}"
    show(title, readings, "umbel")
    for title, like in alike.items():
        console.print(f"{title}: {Ratio.of(readings[title], readings[like])} times {like}", highlight=False)


def absent(peer: Peer, reason: Absent) -> None:
    """Say why a peer is not in the table."""
    console.print(f"{peer.version}: not measured: {reason}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
