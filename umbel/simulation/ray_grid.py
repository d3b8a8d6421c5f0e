"""Runs on a Ray cluster: simulated nodes live in hosts on its machines, and move when one is lost."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Error, Message

from umbel.protocol.flower import ErrorCode, log
from umbel.protocol.plugins import trust_elsewhere
from umbel.protocol.polling import pause
from umbel.protocol.run_config import RunConfig
from umbel.server.app import conduct
from umbel.server.observer import Observer, Run, Section
from umbel.simulation import cluster
from umbel.simulation.grid import SimulatedGrid, partitions
from umbel.simulation.hosts import Lost, RayHosts, environment
from umbel.simulation.places import Place, deal
from umbel.simulation.worth import Appraisal


@dataclass(frozen=True)
class _Sent:
    message: Message
    place: Place
    host: Any
    ticket: Any


class RayGrid(SimulatedGrid):
    """Simulated nodes on the machines of a cluster.

    If a host is gone, the replies of its nodes are errors, as from lost SuperNodes. The nodes are made again, when they
    are next asked for, on machines with their parts of the dataset. Without such a machine, a node is absent until
    there is one. 0 nodes mean one for each machine or GPU.
    """

    def __init__(self, hosts: RayHosts, nodes: int = 0) -> None:
        homes = deal(hosts.places(), nodes)
        super().__init__(partitions(len(homes)))
        self.homes = dict(zip(self.node_configs, homes, strict=True))  # each node's place, by its id
        self.losses: list[tuple[int, str]] = []  # lost nodes, counted from 0, each with its machine
        self._hosts = hosts
        # All at once, since each imports PyTorch first.
        self._started = {place: hosts.start(place) for place in dict.fromkeys(homes)}
        self._homeless: set[int] = set()
        self._sent: dict[str, _Sent] = {}
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that have a place; lost ones are made again if possible."""
        if self._homeless:
            self._settle()
        return [node for node in self.homes if node not in self._homeless]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send each message to its node's place; return the messages' ids."""
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the available replies to the given messages, each once."""
        wanted = list(message_ids)
        tickets = {self._sent[one].ticket: one for one in wanted if one in self._sent}
        for ticket, answer in self._hosts.answers(tickets).items():
            sent = self._sent.pop(tickets[ticket])
            if isinstance(answer, Lost):
                self._lose(sent)
                self._fail(sent.message, f"its host on {sent.place.machine.name} is gone: {answer.reason}")
            else:
                reply, lines = answer
                for level, text in lines:
                    log(level, "%s", text)
                self._take(sent.message, reply)
        return [self._replies.pop(one) for one in wanted if one in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies that come within `timeout` seconds."""
        ids, began = list(self.push_messages(messages)), time.monotonic()
        replies: list[Message] = []
        while True:
            replies += self.pull_messages(ids)
            waited = time.monotonic() - began
            if len(replies) == len(ids) or (timeout is not None and waited >= timeout):
                return replies
            time.sleep(pause(waited))

    def _push(self, message: Message) -> str:
        node, message_id = message.metadata.dst_node_id, self.numbered(message)
        if node in self._homeless:
            self._fail(message, "no available machine has its part of the dataset")
            return message_id
        place = self.homes[node]
        host = self._started[place]
        self._sent[message_id] = _Sent(message, place, host, self._hosts.ask(host, self.node_configs[node], message))
        return message_id

    def _settle(self) -> None:
        """Find places for nodes without one, each where the fewest nodes are; an existing host accepts them."""
        there, count = self._hosts.places(), len(self.homes)
        for node in sorted(self._homeless):
            lives = Counter(home for one, home in self.homes.items() if one not in self._homeless)
            number = int(self.node_configs[node]["partition-id"])
            fitting = [place for place in there if place.holds(number, count)]
            if not fitting:
                continue
            self.homes[node] = place = min(fitting, key=lambda place: (lives[place], place != self.homes[node]))
            self._homeless.discard(node)
            if place not in self._started:
                self._started[place] = self._hosts.start(place)
            log(WARNING, "simulated node %d runs on %s from now on", number, place.machine.name)

    def _lose(self, sent: _Sent) -> None:
        """Note, once, that all nodes of a host that did not answer are lost."""
        # It may be noticed only after another host has taken its place.
        if self._started.get(sent.place) is not sent.host:
            return
        del self._started[sent.place]
        self._hosts.lost(sent.place)
        for node in [node for node, home in self.homes.items() if home == sent.place]:
            self._homeless.add(node)
            self.losses.append((int(self.node_configs[node]["partition-id"]), sent.place.machine.name))

    def _fail(self, message: Message, reason: str) -> None:
        self._take(message, Message(Error(ErrorCode.NODE_UNAVAILABLE, reason), reply_to=message))

    def _take(self, message: Message, reply: Message) -> None:
        self.numbered(reply)
        self._replies[message.metadata.message_id] = reply


class Losses(Observer):
    """Says, in the log and in the report, which simulated nodes were lost, and their state with them."""

    def begin(self, run: Run) -> None:
        """Start to count losses."""
        self._told: list[str] = []
        self._seen = 0

    def after_round(self, run: Run) -> None:
        """Log the losses of this round."""
        assert isinstance(run.grid, RayGrid), "only on a cluster"
        new, self._seen = run.grid.losses[self._seen :], len(run.grid.losses)
        for node, machine in new:
            lost = (
                "their counts for their policy's limits (UMBEL_MAX_PARTICIPATIONS, UMBEL_BUDGET, ...) start from 0 "
                "again, unless UMBEL_LEDGER_PATH names a ledger on disk there"
            )
            if run.setup.model.local_shapes:
                lost += ", and they start with new local parameters"
            text = (
                f"In round {run.state.history[-1].number} simulated node {node} was lost on {machine}. Its "
                f"clients are left out until it returns, on a machine that has their data; then {lost}."
            )
            log(WARNING, "%s", text)
            self._told.append(text)

    def section(self) -> Section | None:
        """Return the same for the report."""
        return Section("Lost simulated nodes", tuple(self._told)) if self._told else None


def run(config: Mapping[str, Any], nodes: int = 0, modules: Sequence[Path] = (), baselines: bool = False) -> Path:
    """Run on the cluster that ``RAY_ADDRESS`` names, and return the run's folder.

    It learns the same as a run in one process. If a machine dies, the round loses the clients that it hosts; they take
    part again as soon as a machine has their data.

    Parameters
    ----------
    config : mapping
        Missing entries have their defaults.
    nodes : int
        Number of simulated nodes; 0 for one for each machine or GPU.
    modules : sequence of Path
        The user's modules, which are shipped too.
    baselines : bool
        Whether to measure the run's worth, if the whole dataset is on this machine.

    Raises
    ------
    ClusterError
        If the cluster cannot be joined, or lacks a part of the dataset.
    ConfigError
        If the run config is invalid.
    FleetError
        If the nodes refuse; the reason is in the log.
    """
    config = RunConfig().entries() | RunConfig.current(config)
    with cluster.joined(environment() | trust_elsewhere(), modules):
        grid = RayGrid(RayHosts(config), nodes)
        homes = ", ".join(dict.fromkeys(place.machine.name for place in grid.homes.values()))
        log(INFO, "%d simulated nodes run on the Ray cluster, on %s", len(grid.homes), homes)
        return conduct(grid, config, secrets.randbelow(10**6), [Losses(), *([Appraisal()] if baselines else [])])
