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


@dataclass(frozen=True)
class _Sent:
    message: Message
    place: Place
    host: Any
    ticket: Any


class RayGrid(SimulatedGrid):
    """Simulated nodes on the machines of a cluster.

    Where a host is gone, its nodes' answers are errors, as of SuperNodes that are gone. They are made again
    when the nodes are next asked for, on machines that have their parts of the dataset. Where there is none,
    a node is not there until there is one. 0 nodes stand for one a machine, or a GPU.
    """

    def __init__(self, hosts: RayHosts, nodes: int = 0) -> None:
        homes = deal(hosts.places(), nodes)
        super().__init__(partitions(len(homes)))
        self.homes = dict(zip(self.node_configs, homes, strict=True))  # by a node's id where it lives
        self.losses: list[tuple[int, str]] = []  # which node, counted from 0, was lost on which machine
        self._hosts = hosts
        # All of them at once: each imports PyTorch first.
        self._started = {place: hosts.start(place) for place in dict.fromkeys(homes)}
        self._homeless: set[int] = set()
        self._sent: dict[str, _Sent] = {}
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that live somewhere; lost ones are made again where that is possible."""
        if self._homeless:
            self._settle()
        return [node for node in self.homes if node not in self._homeless]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send each message to where its node lives; return the messages' ids."""
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return those replies to the given messages that are there, each once."""
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
        """Send messages and return their replies, as many as come within `timeout` seconds."""
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
            self._fail(message, "no machine that is there has its part of the dataset")
            return message_id
        place = self.homes[node]
        host = self._started[place]
        self._sent[message_id] = _Sent(message, place, host, self._hosts.ask(host, self.node_configs[node], message))
        return message_id

    def _settle(self) -> None:
        """Find places for nodes that have none, each where fewest live; a host that is there takes them in."""
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
            log(WARNING, "simulated node %d lives on %s from now on", number, place.machine.name)

    def _lose(self, sent: _Sent) -> None:
        """Note, once, that all that lived with the host that did not answer are lost."""
        # What one host left unanswered may be known only when another has taken its place.
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
    """Says, in the log and in the report, which simulated nodes were lost, and what with them."""

    def begin(self, run: Run) -> None:
        """Count from here on."""
        self._told: list[str] = []
        self._seen = 0

    def after_round(self, run: Run) -> None:
        """Write to the log which were lost in this round."""
        assert isinstance(run.grid, RayGrid), "on a cluster alone"
        new, self._seen = run.grid.losses[self._seen :], len(run.grid.losses)
        for node, machine in new:
            lost = (
                "what their own policy limits (UMBEL_MAX_PARTICIPATIONS, UMBEL_BUDGET, ...) they count anew, unless "
                "UMBEL_LEDGER_PATH names a ledger on disk there"
            )
            if run.setup.model.local_shapes:
                lost += ", and their local parameters begin anew"
            text = (
                f"In round {run.state.history[-1].number} simulated node {node} was lost on {machine}. Its "
                f"clients are left out until it is back, on a machine that has their data; then {lost}."
            )
            log(WARNING, "%s", text)
            self._told.append(text)

    def section(self) -> Section | None:
        """Return the same for the report."""
        return Section("Simulated nodes that were lost", tuple(self._told)) if self._told else None


def run(config: Mapping[str, Any], nodes: int = 0, modules: Sequence[Path] = ()) -> Path:
    """Do a run on the cluster that ``RAY_ADDRESS`` names, and return the folder that it leaves behind.

    What it learns is what a run in one process learns. A machine that dies costs a round the clients that it
    hosts; they take part again where another machine has their data, or when it comes back.

    Parameters
    ----------
    config : mapping
        What it lacks is as by default.
    nodes : int
        Simulated nodes; 0 for one a machine, or a GPU.
    modules : sequence of Path
        The user's own, which go along.

    Raises
    ------
    ClusterError
        When the cluster cannot be joined, or does not have all of the dataset.
    ConfigError
        When it cannot be run.
    FleetError
        When the nodes refuse; the reason is in the log.
    """
    config = RunConfig().entries() | RunConfig.current(config)
    with cluster.joined(environment() | trust_elsewhere(), modules):
        grid = RayGrid(RayHosts(config), nodes)
        homes = ", ".join(dict.fromkeys(place.machine.name for place in grid.homes.values()))
        log(INFO, "%d simulated nodes live on the Ray cluster, on %s", len(grid.homes), homes)
        return conduct(grid, config, secrets.randbelow(10**6), [Losses()])
