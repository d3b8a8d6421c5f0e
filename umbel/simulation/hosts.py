"""Processes on a Ray cluster that host simulated nodes."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from flwr.app import ArrayRecord, Context, Message, RecordDict

import umbel.client.app
from umbel.data import find_dataset
from umbel.protocol.flower import FLOWER_LOGGER, identify
from umbel.simulation.cluster import Machine, here, last_line, machines, on_each
from umbel.simulation.grid import answered
from umbel.simulation.places import Holding, Place, known, look, places

Line = tuple[int, str]
"""A level, and a text in the log."""


@dataclass(frozen=True)
class Lost:
    """A host is gone, with all state of its simulated nodes."""

    reason: str


class Host:
    """Answers messages to its simulated nodes, in a run whose dataset is at a local path."""

    def __init__(self, run_config: Mapping[str, Any]) -> None:
        identify()
        self._run_config = dict(run_config)
        self._contexts: dict[int, Context] = {}

    def answer(
        self, config: Mapping[str, Any], message: Message, arrays: Sequence[str], *records: ArrayRecord
    ) -> tuple[Message, list[Line]]:
        """Return the reply to a message, and the log lines written meanwhile.

        The message comes without its arrays, whose names and records follow; `config` is the node's configuration.
        """
        node = message.metadata.dst_node_id
        context = self._contexts.setdefault(node, Context(1, node, dict(config), RecordDict(), dict(self._run_config)))
        for name, record in zip(arrays, records, strict=True):
            message.content[name] = record
        before, lines = FLOWER_LOGGER.handlers, _Lines()
        FLOWER_LOGGER.handlers = [lines]
        try:
            return answered(umbel.client.app.app, message, context), lines.kept
        finally:
            FLOWER_LOGGER.handlers = before


class RayHosts:
    """Hosts that are Ray actors, in the joined cluster."""

    def __init__(self, run_config: Mapping[str, Any]) -> None:
        self._run_config = dict(run_config)
        self._dataset = str(run_config["dataset"])
        self._path = str(find_dataset(self._dataset))
        self._own: Holding | None = None
        self._first: list[Place] = []
        self._looked: dict[Machine, Holding] = {}
        self._shared: tuple[ArrayRecord, Any] | None = None

    def places(self) -> list[Place]:
        """Return possible places for hosts; a resumed run cannot use machines with other data."""
        there = machines()
        new = [machine for machine in there if machine not in self._looked]
        looked = self._looked | dict(on_each(new, look, self._dataset, self._path, may_die=bool(self._first)))
        self._looked = {machine: looked[machine] for machine in there if machine in looked}
        self._own = self._own or look(self._dataset, self._path)
        found = list(self._looked.items())
        if self._first:
            found = known(found, self._first)
            return places(found, self._own, self._dataset) if found else []
        self._first = places(found, self._own, self._dataset)
        return self._first

    def lost(self, place: Place) -> None:
        """Forget the holdings of the place's machine; this also detects a dead machine."""
        self._looked.pop(place.machine, None)

    def start(self, place: Place) -> Any:
        """Start an actor on the place's machine only."""
        gpus = 1 if place.machine.gpus else 0
        threads = {"OMP_NUM_THREADS": str(max(1, int(place.cpus)))}
        options = {
            "num_cpus": place.cpus,
            "num_gpus": gpus,
            "scheduling_strategy": here(place.machine),
            "runtime_env": {"env_vars": threads},
        }
        return ray.remote(**options)(Host).remote(self._run_config | {"dataset": place.holding.path})

    def ask(self, host: Any, config: Mapping[str, Any], message: Message) -> Any:
        """Send a message; arrays that are the same as in the previous message are not sent again."""
        light, arrays = without_arrays(message)
        return host.answer.remote(dict(config), light, list(arrays), *map(self._put, arrays.values()))

    def answers(self, tickets: Iterable[Any]) -> dict[Any, tuple[Message, list[Line]] | Lost]:
        """Return the available answers; this never waits."""
        waiting = list(tickets)
        if not waiting:
            return {}
        found: dict[Any, tuple[Message, list[Line]] | Lost] = {}
        for ticket in ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]:
            try:
                found[ticket] = ray.get(ticket)
            except ray.exceptions.RayError as error:
                found[ticket] = Lost(last_line(error).partition(". ")[0])
        return found

    def _put(self, record: ArrayRecord) -> Any:
        if self._shared is None or self._shared[0] is not record:
            self._shared = (record, ray.put(record))
        return self._shared[1]


def without_arrays(message: Message) -> tuple[Message, dict[str, ArrayRecord]]:
    """Return a message without its arrays, and the arrays: all messages of a round may share them."""
    light, content = copy.copy(message), message.content
    arrays = {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}
    light.content = RecordDict({name: record for name, record in content.items() if name not in arrays})
    return light, arrays


def environment() -> dict[str, str]:
    """Return the part of this process's environment for hosts: the policy of simulated nodes.

    ``UMBEL_HOME`` is not in it: each machine has a different one.
    """
    return {key: value for key, value in os.environ.items() if key.startswith("UMBEL_") and key != "UMBEL_HOME"}


class _Lines(logging.Handler):
    """Collects log records."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Line] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append((record.levelno, self.format(record)))
