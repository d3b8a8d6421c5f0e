"""The roster: the nodes of a run and the clients that they host."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import DEBUG, INFO, WARNING
from types import MappingProxyType

import numpy as np
from flwr.app import Message, RecordDict
from numpy.typing import NDArray

from umbel.nodes.exchange import Answer, Exchange
from umbel.nodes.words import PASSING, code_in, moves
from umbel.protocol.asked import Names
from umbel.protocol.clients import ClientOnNode
from umbel.protocol.errors import ConfigError, FleetError, ProtocolError
from umbel.protocol.log import log
from umbel.protocol.messages import hosting_in, query
from umbel.protocol.polling import pause
from umbel.protocol.presence import Absence, Presence
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import Hosting
from umbel.protocol.words import as_line, at_time, count_of

TRAIN, VALIDATION = "training", "validation"
MORE_NODES = "umbel run --nodes, or num-supernodes in Flower's --federation-config"
"""How a simulation gets more nodes."""

_POLL_S = 1.0  # maximum seconds of one look for replies
_AGAIN_S, _SELDOM_S = 5.0, 60.0  # shortest and longest pause before a node that refused is asked again
_CODES = 50  # of one node: more than umbel has


class Roster:
    """The clients of all nodes. Their numbers do not depend on the number of nodes.

    Training clients have the numbers 0 to `train` - 1 and validation clients 0 to
    `validation` - 1. In simulation the numbers are the dataset's own order; elsewhere nodes
    follow each other by node id.

    Parameters
    ----------
    nodes : dict from int to Hosting
        Each node's account of its clients, by node id.
    names : Names, optional
        The names of the nodes in the log.
    """

    def __init__(self, nodes: Mapping[int, Hosting], names: Names | None = None) -> None:
        self.names = Names() if names is None else names
        self._absent: dict[int, Absence] = {}
        self._away: dict[int, Absence] = {}
        self.seen: dict[int, float] = {}
        """When each node last replied to a round's message, in seconds since 1970."""
        self.refusals: dict[int, Counter[str]] = {}
        """How often each node refused, by code; empty where a site tells no reason, or makes up too many codes."""
        self._nodes: dict[int, Hosting] = {}
        self.join(nodes)

    @property
    def nodes(self) -> list[tuple[int, Hosting]]:
        """Each node with its account, in the order in which their clients are numbered."""
        return list(self._nodes.items())

    @classmethod
    def resumed(cls, before: Sequence[tuple[int, Hosting]], now: Roster) -> Roster:
        """Return the nodes of a resumed run: numbered as before, with new ones after them.

        Absent nodes keep their numbers, in case they return. A node that hosts other clients than before is left out,
        since its clients can no longer be identified.
        """
        if now.simulated:
            return now
        roster = cls(dict(before), now.names)
        roster._nodes = dict(before)
        for node, was in before:
            if now._nodes.get(node, was) != was:
                roster._absent[node] = Absence(1, sys.maxsize, Presence.CHANGED, time.time())
                log(WARNING, "%s hosts other clients than before and is left out of this run", now.names[node])
        roster.join({node: hosts for node, hosts in now.nodes if node not in roster})
        return roster

    def join(self, nodes: Mapping[int, Hosting]) -> None:
        """Add nodes; their clients' numbers follow the existing ones."""
        self._nodes |= dict(sorted(nodes.items()))
        hosting = list(self._nodes.values())
        self._steps = {one.step for one in hosting}
        if len(self._steps) > 1:
            raise FleetError(
                "some nodes are simulated and some are not, or they split the dataset differently", code="nodes.mixed"
            )
        if self.simulated:
            # By partition, because each run draws new node ids.
            self._nodes = dict(sorted(self._nodes.items(), key=lambda item: item[1].first))
            hosting = list(self._nodes.values())
            if [one.first for one in hosting] != list(range(hosting[0].step)):
                raise FleetError("the simulated nodes do not split the dataset among themselves", code="nodes.mixed")
        self._ids = list(self._nodes)
        counts = np.array([(one.train, one.validation) for one in hosting]).reshape(-1, 2)
        self.counts = {TRAIN: counts[:, 0], VALIDATION: counts[:, 1]}
        """Number of clients of each role on each node."""
        self.train, self.validation = map(int, counts.sum(axis=0))

    @property
    def simulated(self) -> bool:
        """Whether the nodes split one dataset among themselves."""
        return self._steps != {-1}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: int) -> bool:
        return node in self._nodes

    def see(self, nodes: Iterable[int], late: Iterable[int] = ()) -> None:
        """Leave out each node that is not among these, or that is late, until it is seen again, or has replied."""
        seen, late, before = set(nodes), set(late), self._away
        self._away = {}
        for node in self._nodes:
            if node in seen and node not in late:
                continue
            presence = Presence.LATE if node in seen else Presence.OFFLINE
            was = before.get(node)
            self._away[node] = (
                was if was and was.presence is presence else Absence(presence=presence, since=time.time())
            )

    def note(
        self,
        round: int,
        answered: Iterable[int],
        silent: Iterable[int],
        refused: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Note which nodes replied in a round, which did not, and which refused, with the codes of their reasons.

        A node that did not reply, or refused, is left out for a round, and after each further failure for twice as
        many plus one: a node that is gone would delay every round.
        """
        for node in answered:
            self._absent.pop(node, None)
            self.seen[node] = time.time()
        for node, code in refused.items():
            self.seen[node] = time.time()
            known = self.refusals.setdefault(node, Counter())
            known[code if code in known or len(known) < _CODES else ""] += 1
        for nodes, presence, what in (
            (silent, Presence.SILENT, "did not reply in"),
            (refused, Presence.REFUSED, "refused the task of"),
        ):
            for node in nodes:
                absence = self._absent[node] = Absence.following(self._absent.get(node), round, presence)
                out = count_of(absence.until - round, "round")
                log(WARNING, "%s %s round %d and is left out for %s", self.names[node], what, round, out)

    def state(self, node: int, round: int) -> Absence:
        """Return whether a node can be asked in a round, and if not, why and since when."""
        if (away := self._away.get(node)) is not None:
            return away
        absence = self._absent.get(node)
        if absence is None or round > absence.until:
            return Absence(presence=Presence.ONLINE)
        return absence

    def readmit(self, round: int) -> None:
        """Ask nodes again in a round whose time as silent or refusing nodes is over, in a run that is paused."""
        now = time.monotonic()
        for node, absence in self._absent.items():
            if absence.until >= round and absence.presence is not Presence.CHANGED and now >= absence.ends:
                self._absent[node] = replace(absence, until=round - 1)

    def enough(self, round: int, least: int) -> bool:
        """Return whether a round can ask at least so many nodes, and training clients on one of them."""
        gone = self.gone(round)
        there = [hosting for node, hosting in self._nodes.items() if node not in gone]
        return len(there) >= least and any(hosting.train for hosting in there)

    def refuses(self, times: int) -> bool:
        """Return whether each node with training clients has failed at least so often in a row, and refused at last."""
        absences = [self._absent.get(node) for node, hosting in self._nodes.items() if hosting.train]
        return all(one and one.presence is Presence.REFUSED and one.times >= times for one in absences)

    def missing(self, round: int) -> str:
        """Return the nodes that a round cannot ask, with the reasons."""
        gone = self.gone(round)
        states = {node: self.state(node, round) for node in self._nodes if node in gone}
        return ", ".join(
            f"{self.names[node]} ({state.presence} since {at_time(state.since)})" for node, state in states.items()
        )

    def present(self, role: str, round: int) -> NDArray[np.int64]:
        """Return the clients of a role whose nodes are not left out in a round, in increasing order."""
        clients, gone = np.arange(self.counts[role].sum()), self.gone(round)
        there = np.full(len(clients), True)
        for node, (positions, _) in self.place(role, clients).items() if gone else ():
            there[positions] = node not in gone
        return clients if not there.any() and self.asks_absent(role) else clients[there]

    def asks_absent(self, role: str) -> bool:
        """Return whether clients of a role are asked although all their nodes are gone.

        That is better than a round without training clients. But a site that alone has validation clients would delay
        each round.
        """
        return role == TRAIN or self.simulated

    def gone(self, round: int) -> set[int]:
        """Return the nodes that are left out of a round, because they failed to reply or are away."""
        return set(self._away) | {node for node, absence in self._absent.items() if round <= absence.until}

    def place(self, role: str, clients: NDArray[np.int64]) -> dict[int, tuple[list[int], list[ClientOnNode]]]:
        """Group clients by node.

        Parameters
        ----------
        role : str
            `TRAIN` or `VALIDATION`.
        clients : ndarray of int
            Clients of that role.

        Returns
        -------
        dict from node id to (positions, locals)
            Positions in `clients`, and the same clients in the node's numbering.
        """
        if self.simulated:
            number = clients + (self.train if role == VALIDATION else 0)
            (step,) = self._steps
            node, local = number % step, number // step
        else:
            counts = self.counts[role]
            first = np.cumsum(counts) - counts
            node = np.searchsorted(first + counts, clients, side="right")
            local = clients - first[node]
            if role == VALIDATION:
                local = local + self.counts[TRAIN][node]
        order = np.argsort(node, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(node[order])) + 1) if len(order) else []
        return {self._ids[node[part[0]]]: (part.tolist(), local[part].tolist()) for part in parts}


def gather(exchange: Exchange, run: RunConfig) -> Roster:
    """Ask the nodes for their clients, until all are there.

    This waits for the nodes and the clients that the run asks for. In simulation it waits for every part of the
    dataset, since the first look may show only some of the nodes. A node with an invalid reply is left out.

    A node starts a process and imports PyTorch before its first reply, which takes minutes on a slow machine. So a
    query lives as long as the run waits, and a node is asked again only after Flower reports that its query is lost, or
    after a refusal that may pass (`umbel.nodes.words.PASSING`).

    Parameters
    ----------
    exchange : Exchange
        The exchange of the rounds: it returns late replies.

    Raises
    ------
    FleetError
        If the nodes are missing after the ``seconds`` of ``wait``.
    """
    began, together = time.monotonic(), exchange.transport.together
    nodes: dict[int, Hosting] = {}
    refused: dict[int, float] = {}  # when to ask again
    hopes: dict[int, str] = {}  # why a refusal may pass
    waiting = False
    while True:
        left = max(_POLL_S, began + run.wait.seconds - time.monotonic())
        refusing = {node for node, again in refused.items() if time.monotonic() < again}
        asked = {*nodes, *refusing, *exchange.awaited("query")}
        new = [node for node in sorted(exchange.connected()) if node not in asked]
        queries = [Message(query(), node, "query", group_id="query", ttl=left) for node in new]
        for answer in exchange.run(queries, _POLL_S, keep_late=("query",)):
            known = answer.node in refused
            hosting = hosting_of(answer, run.per_node.clients, together, exchange.names, quietly=known)
            if hosting is not None:
                nodes[answer.node] = hosting
                refused.pop(answer.node, None)
            elif not answer.gone:
                code = code_in(str(answer.reply.error.reason)) if answer.reply.has_error() else ""
                passes = code in PASSING
                if passes:
                    hopes[answer.node] = PASSING[code]
                rest = pause(time.monotonic() - began, _AGAIN_S, _SELDOM_S) if passes else math.inf
                refused[answer.node] = time.monotonic() + rest
        fitting = fellows(nodes)
        parts = max(1, next((hosting.step for hosting in fitting.values()), 1))
        waited = time.monotonic() - began
        if len(fitting) >= max(run.wait.nodes, parts):
            there = [sum(one.train for one in fitting.values()), sum(one.validation for one in fitting.values())]
            # Where nodes are in many places, more of them may come.
            enough = there[0] >= run.clients_per_round and there[1] >= run.validation.clients
            if together or enough or waited >= run.wait.seconds:
                for node in set(nodes) - set(fitting):
                    name = exchange.names[node]
                    log(WARNING, "%s splits the dataset differently from most and is left out", name)
                hosts = f"{count_of(len(fitting), 'node')} {'hosts' if len(fitting) == 1 else 'host'}"
                log(INFO, "%s %d training and %d validation clients", hosts, *there)
                return Roster(fitting, exchange.names)
        if together and parts < run.wait.nodes and any(hosting.simulated for hosting in fitting.values()):
            raise FleetError(
                f"wait: nodes = {run.wait.nodes}, and the simulation has {count_of(parts, 'node')}; lower it, or "
                f"simulate more: {MORE_NODES}",
                code="nodes.too-few",
            )
        if together and refused and parts > 1:
            raise FleetError(
                f"{count_of(len(refused), 'simulated node')} refused to take part; the log above says why",
                code="nodes.refused",
            )
        if waited >= run.wait.seconds:
            raise FleetError(
                f"after {run.wait.seconds:.0f} s the run has {len(fitting)} of "
                f"{count_of(max(run.wait.nodes, parts), 'node')}, and {len(refused)} refused{_hopes(refused, hopes)}; "
                "start more nodes, or set fewer nodes or more seconds in wait",
                code="nodes.missing",
            )
        if not waiting:
            log(INFO, "waiting for nodes to report their clients, for at most %.0f s", run.wait.seconds)
            waiting = True
        time.sleep(pause(waited))


def _hopes(refused: Container[int], hopes: Mapping[int, str]) -> str:
    """Return why refusals may pass, if they may: then to wait longer helps."""
    reasons = Counter(why for node, why in hopes.items() if node in refused)
    return "".join(f", {times} because {why}" for why, times in sorted(reasons.items()))


def hosting_of(
    answer: Answer,
    max_clients: int,
    together: bool,
    names: Names,
    roster: Roster | None = None,
    quietly: bool = False,
) -> Hosting | None:
    """Return a node's account, if it may join; None, and a line in the log unless `quietly`, if it may not."""
    try:
        if answer.reply.has_error():
            reason = str(answer.reply.error.reason)
            raise ProtocolError(f"says {reason}{moves(reason) or ' (its log says why)'}", code="protocol.node-error")
        hosting = admitted(answer.reply.content, max_clients, together)
        if roster is not None and answer.node in roster:
            raise ProtocolError("takes part already", code="protocol.hosting")
        if roster is not None and hosting.simulated:
            raise ProtocolError("says that it is simulated", code="protocol.hosting")
        return hosting
    except Exception as error:  # keep running: one bad node must not stop the run
        log(DEBUG if quietly else WARNING, "%s cannot take part: it %s", names[answer.node], as_line(error))
        return None


def admitted(content: RecordDict, max_clients: int, together: bool) -> Hosting:
    """Return a node's account of its clients, checked.

    Only in simulation does its part of the dataset matter: elsewhere a site could lie about it, and other sites would
    be asked for clients that they do not host.

    Raises
    ------
    ProtocolError
        If the account is impossible or not allowed.
    """
    hosting = hosting_in(content)
    if hosting.step == 1 and not together:
        raise ProtocolError("says that it is the only node of a simulation", code="protocol.hosting")
    if not together:
        hosting = replace(hosting, first=-1, step=-1)
    if hosting.train + hosting.validation > max_clients and not hosting.simulated:
        raise ProtocolError(
            f"says that it hosts {hosting.train} training and {hosting.validation} validation clients, more than "
            f"the {max_clients} of per-node",
            code="protocol.too-many-clients",
        )
    if not (hosting.train or hosting.validation or hosting.simulated):
        raise ProtocolError("hosts no clients", code="protocol.hosting")
    return hosting


def fellows(nodes: Mapping[int, Hosting]) -> dict[int, Hosting]:
    """Return the nodes that fit into one run: the majority, and on a tie those that serve their own data."""
    counts = Counter(hosting.step for hosting in nodes.values())
    step = max(counts, key=lambda step: (counts[step], step < 0), default=-1)
    found: dict[int, Hosting] = {}
    parts: set[int] = set()
    for node, hosting in sorted(nodes.items()):
        if hosting.step == step and hosting.first not in parts:
            found[node] = hosting
            parts.update({hosting.first} - {-1})
    return found


def check_enough(what: str, asked: int, there: int) -> None:
    """Raise `ConfigError` if more clients are asked for than exist."""
    if asked > there:
        raise ConfigError(
            f"{what} = {asked} exceeds the number of such clients on the nodes, {there}; lower it",
            code="config.too-few-clients",
        )
