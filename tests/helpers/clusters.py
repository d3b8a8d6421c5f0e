"""Ray clusters on this machine, and hosts of simulated nodes that need none."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from flwr.app import Message

from tests.helpers.ports import free_port
from umbel.data import open_dataset, shard, write_dataset
from umbel.simulation.cluster import Machine
from umbel.simulation.hosts import Host, Line, Lost, without_arrays
from umbel.simulation.places import Place, look, places

# A dead machine, at which nobody listens, is found soon; one that is only slow to answer is not taken for dead.
_FAST = {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "300000"}


def write_part(source: Path, folder: Path, first: int, step: int) -> Path:
    """Write a part of a dataset."""
    part = shard(open_dataset(source), first, step)
    write_dataset(folder, part.manifest, part.features, part.targets, part.offsets, part.names)
    return folder


@dataclass(frozen=True)
class Cluster:
    """Ray as it runs, a process a machine."""

    address: str
    machines: list[subprocess.Popen[bytes]]

    def kill(self, machine: int) -> None:
        """Kill all processes of a machine at once, as when it loses its power."""
        head = psutil.Process(self.machines[machine].pid)
        for process in [head, *head.children(recursive=True)]:
            process.kill()


@contextmanager
def cluster(folder: Path, homes: Sequence[Path] = ()) -> Iterator[Cluster]:
    """Start a Ray cluster of machines of one core, each with a ``UMBEL_HOME`` of its own where these are given."""
    port = free_port()
    # In a scratch folder of its own, or others on this machine would take it for theirs; a short one,
    # because sockets lie in it.
    scratch = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    first = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={scratch}"]
    running = Cluster(f"127.0.0.1:{port}", [])
    try:
        for number, home in enumerate(homes or [None]):
            where = [f"--address={running.address}"] if number else first
            command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1", *where]
            own = {} if home is None else {"UMBEL_HOME": str(home)}
            _start(running, command, folder, folder / f"ray-{number}.log", own)
        yield running
    finally:
        for machine in running.machines[::-1]:
            _stop(machine)
        shutil.rmtree(scratch, ignore_errors=True)


def _start(running: Cluster, command: list[str], folder: Path, log: Path, own: Mapping[str, str]) -> None:
    environment = {**os.environ, **_FAST, "RAY_USAGE_STATS_ENABLED": "0", **own}
    with log.open("w") as out:
        # A group of its own, so that it can be stopped without stopping other people's clusters.
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True)
    running.machines.append(process)
    deadline = time.monotonic() + 900
    while "Ray runtime started" not in log.read_text():
        assert time.monotonic() < deadline
        assert process.poll() is None, log.read_text()
        time.sleep(0.2)


def _stop(machine: subprocess.Popen[bytes]) -> None:
    members = psutil.Process(machine.pid).children(recursive=True) if machine.poll() is None else []
    machine.terminate()
    _, alive = psutil.wait_procs(members, timeout=60)
    for process in alive:
        process.kill()
    machine.wait(timeout=900)


class FakeHosts:
    """Hosts in this process, on machines that are names; all that travels is pickled, as on a cluster.

    Parameters
    ----------
    run_config : mapping
    homes : mapping from str to Path
        Where each machine has the dataset.
    """

    def __init__(self, run_config: Mapping[str, Any], homes: Mapping[str, Path]) -> None:
        self.run_config, self.homes = run_config, homes
        self.alive = list(homes)
        self.started: list[str] = []
        self.asked: list[str] = []
        self._tickets = count()
        self._answers: dict[int, tuple[Message, list[Line]] | Lost] = {}
        self._dying: set[str] = set()

    def places(self) -> list[Place]:
        found = [(Machine(one, one, 1.0, 0), look("own", str(self.homes[one]))) for one in self.alive]
        return places(found, found[0][1], "own") if found else []

    def lost(self, place: Place) -> None:
        self._dying.discard(place.machine.name)

    def start(self, place: Place) -> tuple[str, Host]:
        self.started.append(place.machine.name)
        return place.machine.name, Host({**self.run_config, "dataset": place.holding.path})

    def ask(self, host: tuple[str, Host], config: Mapping[str, Any], message: Message) -> int:
        name, process = host
        self.asked.append(name)
        ticket = next(self._tickets)
        if name in self._dying or name not in self.alive:
            self._answers[ticket] = Lost("killed")
        else:
            light, arrays = pickle.loads(pickle.dumps(without_arrays(message)))
            reply = process.answer(config, light, list(arrays), *arrays.values())
            self._answers[ticket] = pickle.loads(pickle.dumps(reply))
        return ticket

    def answers(self, tickets: Iterable[int]) -> dict[int, tuple[Message, list[Line]] | Lost]:
        return {ticket: self._answers.pop(ticket) for ticket in list(tickets)}

    def kill_host(self, name: str) -> None:
        """Have the process on a machine die, and not the machine."""
        self._dying.add(name)

    def kill(self, name: str) -> None:
        """Have a machine die."""
        self.alive.remove(name)
