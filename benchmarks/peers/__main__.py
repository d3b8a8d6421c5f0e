"""Time umbel and its peers on the same tasks, in turns.

    python -m benchmarks.peers [--rounds N] [--times N] [--task hospital] [--only fedjax,pfl]

The first time it installs each peer in a virtual environment under $UMBEL_HOME/peers. Start-up,
reading of data and compilation are not measured. The hospital task needs its federation
(datasets/hospital.py).
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import client.app
from benchmarks.measure import Reading, console, interleave, machine, show
from benchmarks.peers.rivals import PEERS, Absent, Rival, environment
from benchmarks.peers.tasks import TASKS, brief_of
from federation import FederationError
from server.rounds import State, initial_hypotheses, run_rounds
from server.settings import Settings
from simulation.grid import InProcessGrid

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
    times: Annotated[int, typer.Option(min=1, help="Goes of each contestant that count.")] = 5,
    only: Annotated[str, typer.Option(help="Peers, apart by commas; none with 'umbel'.")] = ",".join(PEERS),
    task: Annotated[str, typer.Option(help="Tasks, apart by commas.")] = ",".join(TASKS),
    cores: Annotated[int, typer.Option(min=1, help="That each contestant may use.")] = 1,
) -> None:
    """Print a table for each task, and what each peer leaves out."""
    names = [name for name in only.split(",") if name != "umbel"]
    if unknown := [*(set(names) - set(PEERS)), *(set(task.split(",")) - set(TASKS))]:
        raise typer.BadParameter(f"unknown {', '.join(unknown)}; there are {', '.join([*PEERS, *TASKS])}")
    logging.getLogger("flwr").setLevel(logging.ERROR)
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
    for one in task.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            try:
                config = TASKS[one](Path(scratch))
                compare(one, config | ({"rounds": rounds} if rounds else {}), pythons, Path(scratch), times, cores)
            except FederationError as error:
                console.print(f"{one}: not measured: {error}", highlight=False)
    for name in names:
        console.print(f"{PEERS[name].version} leaves out: {PEERS[name].lacks}.", highlight=False)


def compare(
    task: str, config: Mapping[str, Any], pythons: Mapping[str, Path], folder: Path, times: int, cores: int
) -> None:
    """Let umbel and the peers do a task in turns, and print what they took."""
    brief = brief_of(config, cores)
    brief.write(folder)
    contestants = {name: ours({**config, **changes}) for name, changes in OURS.items()}
    with ExitStack() as processes:
        for name, python in pythons.items():
            for variant, title in PEERS[name].contestants.items():
                rival = Rival(python, name, variant, folder, cores)
                processes.callback(rival.stop)
                try:
                    rival.go()  # whoever cannot do this is out, and the others go on
                except Absent as reason:
                    absent(name, reason)
                else:
                    contestants[title] = rival.go
        readings = interleave(contestants, times)
    settings = brief.settings
    show(
        f"{task}: {len(settings.train[0])} clients train and {len(settings.validate[0])} validate in each of "
        f"{brief.rounds} rounds, k = {config['hypotheses']}",
        readings,
        "umbel",
    )


def ours(config: Mapping[str, Any]) -> Callable[[], Reading]:
    """Return what does one run of umbel, from messages to the ledger, in this process."""

    def go() -> Reading:
        settings, grid = Settings.parse(config), InProcessGrid(client.app.app, config)
        start = initial_hypotheses(settings, grid)
        state = State(hypotheses=start, best=start)
        began = time.perf_counter()
        run_rounds(settings, grid, state, lambda state: None)
        seconds = time.perf_counter() - began
        if any(entry.lost_nodes for entry in state.history):
            raise RuntimeError("the simulated node refused; the log says why")
        return Reading(seconds / settings.rounds, state.history[-1].loss)

    return go


def absent(name: str, reason: Absent) -> None:
    """Say why a peer is not in the table."""
    console.print(f"{PEERS[name].version}: not measured: {reason}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
