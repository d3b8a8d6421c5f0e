"""The nodes of umbel's own app, which host many clients each, as a strategy sees them.

A node gets one message a round, at `umbel.client.app`, behind the gate (`umbel.privacy.site.umbel_app`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from logging import INFO, WARNING
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from umbel.nodes.asking import ask
from umbel.nodes.exchange import Answer, Exchange
from umbel.nodes.roster import TRAIN, VALIDATION, Roster, check_enough, gather, hosting_of
from umbel.nodes.sampler import draw, draw_in_turn
from umbel.nodes.transport import transport_of
from umbel.nodes.words import code_in
from umbel.privacy.channels import Channel, load
from umbel.protocol.arrays import Arrays
from umbel.protocol.asked import Asked
from umbel.protocol.clients import ClientInRun
from umbel.protocol.errors import FleetError
from umbel.protocol.flower import ErrorCode, filled
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.log import log
from umbel.protocol.messages import (
    evaluation_in,
    keep_request,
    merged,
    numbers_asked,
    query,
    training_in,
)
from umbel.protocol.polling import pause
from umbel.protocol.presence import Absence
from umbel.protocol.records import from_array_record, pack, to_array_record, unpack
from umbel.protocol.releases import Releases, Sums
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import EvaluationSpec, Hosting, TrainingSpec
from umbel.protocol.words import as_line, at_time, in_time

# Keys that separate the server's draws for different purposes.
_SAMPLE_TRAIN, _SAMPLE_VALIDATION = 1, 2
_KEEP_S = 300.0  # seconds for which a run that is over waits for its nodes to be told
_POLL_S = 5.0  # maximum seconds between two looks for nodes in a pause
_TELL_S = 600.0  # between two lines about a pause
_NOBODY = np.zeros(0, np.int64)


class Fleet:
    """The nodes of a run and their clients.

    Clients are sampled over all nodes, and their replies are put in client order before anything is computed. So the
    result does not depend on the number of nodes or on the order of replies.

    Parameters
    ----------
    run : RunConfig, optional
        Gives the number of clients in a round, and of nodes to wait for.
    **entries
        Entries of a run config, instead of one; others have their defaults.
    """

    def __init__(self, run: RunConfig | None = None, **entries: Any) -> None:
        self.run = run or RunConfig(**entries)
        self.metric_is_share = False
        """Whether the metric is one from 0 to 1, as an accuracy."""
        self.participations: NDArray[np.int64] = _NOBODY
        """Number of releases of each training client."""
        self.unanswered = False
        """Whether no node replied to the last round, and some may only be away. Nodes that all refuse are not."""
        self.dropped = 0
        """Number of useless replies in the last round, and of releases too far from the hypotheses."""
        self._turns: NDArray[np.int64] = _NOBODY  # how often each was asked
        self._roster: Roster | None = None
        self._exchange: Exchange | None = None
        self._invited: dict[int, Absence] = {}
        self._looked, self._connected = -1, set[int]()
        self._unanswered_since = math.inf  # by the clock of `time.monotonic`
        self._channels: dict[str, Channel] = {}

    def roster(self, grid: Grid) -> Roster:
        """Return the nodes and their clients, asking them the first time."""
        if self._roster is None:
            roster = gather(self.exchange_on(grid), self.run)
            check_enough("clients-per-round", self.run.clients_per_round, roster.train)
            check_enough("validation clients", self.run.validation.clients, roster.validation)
            self.participations, self._turns = np.zeros((2, roster.train), np.int64)
            self._roster = roster
        return self._roster

    def exchange_on(self, grid: Grid) -> Exchange:
        """Return the exchange with the nodes of a grid."""
        if self._exchange is None or self._exchange.transport.grid is not grid:
            self._exchange = Exchange(transport_of(grid))
        return self._exchange

    def resume(self, grid: Grid, nodes: Sequence[tuple[int, Hosting]], spent: Mapping[ClientInRun, int]) -> None:
        """Resume a run.

        Parameters
        ----------
        nodes : sequence of (int, Hosting)
            The nodes before the interruption, in the order of their clients.
        spent : mapping from ClientInRun to int
            Number of releases of each client that released.
        """
        self._roster = Roster.resumed(nodes, self.roster(grid))
        self.participations = np.zeros(self._roster.train, np.int64)
        self.participations[list(spent)] = list(spent.values())
        self._turns = self.participations.copy()  # a lower bound: requests without a release are not on record

    # --- asking

    def read_hypotheses(self, arrays: ArrayRecord) -> Hypotheses:
        """Return the hypotheses of a record, packed as they travel."""
        return Hypotheses(unpack(pack(from_array_record(arrays))))

    def record(self, hypotheses: Arrays) -> ArrayRecord:
        """Return hypotheses as the record from which a round's messages are made."""
        return to_array_record(hypotheses)

    def asked(self, messages: Sequence[Message], asked: Asked) -> Asked:
        """Return who was asked, which messages that a strategy changed do not tell."""
        return asked

    def ask_training(
        self,
        round: int,
        hypotheses: Hypotheses,
        config: TrainingSpec | Mapping[str, Any],
        grid: Grid,
        decisions: Mapping[str, Any] = MappingProxyType({}),
        clients: NDArray[np.int64] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Asked:
        """Ask clients to train, by one message for each node.

        Parameters
        ----------
        hypotheses : Hypotheses
            The hypotheses to start from.
        config : TrainingSpec or mapping
            The task of all clients, or some of its fields; clip norm, round and clients are filled in here.
        decisions : mapping
            Fields of the task that the strategy decides.
        clients : ndarray of int, optional
            The clients to ask, in increasing order; by default the round's sample.
        options : mapping
            Those of the task's channel (`umbel.privacy.channels.Channel.invite`).
        """
        task = config if isinstance(config, TrainingSpec) else self.task_of(round, config, decisions)
        roster, run = self._look(grid, round), self.run
        if clients is None:
            seed, size, most = [run.seed, _SAMPLE_TRAIN, round], run.clients_per_round, run.max_participations
            if most:  # requests count, not releases: otherwise clients that refuse would always be asked first
                clients = draw_in_turn(roster, round, seed, size, self._turns, most)
                self._turns[clients] += 1
            else:
                clients = draw(roster, TRAIN, round, seed, size, run.per_node.share)
        asked = ask(roster, clients, round, hypotheses, task)
        self.channel(task).invite(round, asked, options)
        return asked

    def channel(self, task: TrainingSpec | EvaluationSpec) -> Channel:
        """Return the channel by which the results of a task come back, with what it remembers of the run."""
        name = task.channel
        if name not in self._channels:
            self._channels[name] = load(name)(self)
        return self._channels[name]

    def task_of(self, round: int, config: Mapping[str, Any], decisions: Mapping[str, Any]) -> TrainingSpec:
        """Return the task for all clients of a round."""
        clip = {"clipping": str(self.run.clipping.mode), "clip_norm": self.run.clipping.at(round)}
        return TrainingSpec.of_config({**dict(config.items()), **clip, **decisions})

    def ask_evaluation(
        self,
        round: int,
        hypotheses: Hypotheses,
        config: EvaluationSpec | Mapping[str, Any],
        grid: Grid,
        decisions: Mapping[str, Any] = MappingProxyType({}),
        group: str = "",
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Asked:
        """Ask a sample of the validation clients to score the hypotheses, by one message for each node."""
        task = config if isinstance(config, EvaluationSpec) else EvaluationSpec.of_config({**config, **decisions})
        roster, run = self._look(grid, round), self.run
        seed, size = [run.seed, _SAMPLE_VALIDATION, round], run.validation.clients or roster.validation
        clients = draw(roster, VALIDATION, round, seed, size, run.per_node.share)
        asked = ask(roster, clients, round, hypotheses, task, group)
        self.channel(task).invite(round, asked, options)
        return asked

    @property
    def used_up(self) -> bool:
        """Whether every training client has reached its maximum number of participations."""
        return len(self._turns) > 0 and 0 < self.run.max_participations <= int(self._turns.min())

    def waits(self, grid: Grid) -> bool:
        """Return whether the run waits for nodes that are away: not in simulation, and not before its first release."""
        return not self.exchange_on(grid).transport.together and bool(self.participations.any())

    def wait(self, round: int, grid: Grid, paused: Callable[[float, float], None] = lambda *_: None) -> None:
        """Wait until enough nodes are there for a round.

        They are as many as ``below`` in the run config's ``wait``, one of them with training clients. In simulation
        lost nodes do not return. Before the first release of a run, a node that refuses is more likely to disagree with
        the run config than to be away.

        Parameters
        ----------
        paused : callable
            Is called while the run waits, with the start of the pause and its latest end, in seconds since 1970.

        Raises
        ------
        FleetError
            If the nodes are missing after the seconds that it allows, counted from the first reply that no node gave.
        """
        if not self.waits(grid):
            return
        roster, exchange = self._look(grid, round), self.exchange_on(grid)
        now, told, least = time.monotonic(), -math.inf, self.run.wait.below
        # Otherwise a round whose nodes are connected, and never reply, would be repeated without end.
        began = min(now, self._unanswered_since)
        since = time.time() - (now - began)
        while not roster.enough(round, least):
            waited = time.monotonic() - began
            waits_for = f"for {roster.missing(round)}" if roster.gone(round) else "for more nodes"
            if waited >= self.run.wait.pause:
                raise FleetError(
                    f"round {round} waited {in_time(waited)} {waits_for}, since fewer than the {least} below which "
                    "it pauses can be asked; the run can be resumed when they are back, or with a lower pause",
                    code="nodes.away",
                )
            if waited - told >= _TELL_S:
                told = waited
                text = "Paused before round %d since %s: %d of %d nodes can be asked. Waiting %s, at most until %s"
                left, end = len(roster) - len(roster.gone(round)), since + self.run.wait.pause
                log(WARNING, text, round, at_time(since), left, least, waits_for, at_time(end))
                paused(since, end)
            for answer in exchange.run(self._invitations(round, exchange), _POLL_S, keep_late=("query",)):
                if answer.kind == "query":
                    self._welcome(answer, exchange.transport.together)
            time.sleep(pause(waited, longest=_POLL_S))
            self._look(grid, round, again=True)
            roster.readmit(round)
        if told >= 0:
            log(INFO, "The run continues with round %d, after a pause of %s", round, in_time(time.monotonic() - began))

    def _look(self, grid: Grid, round: int, again: bool = False) -> Roster:
        """Return the roster, which knows which nodes are away, and which are still at work for an earlier round.

        A SuperLink is asked for its nodes once a round, or `again`.
        """
        roster, exchange = self.roster(grid), self.exchange_on(grid)
        if self._looked != round:
            self.dropped = 0
        if again or exchange.transport.together or self._looked != round:
            self._looked, self._connected = round, exchange.connected()
            roster.see(self._connected, exchange.late(keep_late=("query",)))
        return roster

    # --- sending and waiting

    def exchange(
        self, round: int, grid: Grid, messages: Sequence[Message], timeout: float
    ) -> tuple[list[Message], list[Message]]:
        """Send a round's messages, one for each node; return the replies that came in time, twice.

        A reply may both train and evaluate, so those who read either part read all replies.

        The round closes when a `quorum` of its clients has replied, or time is up. New nodes are asked for their
        clients and take part from the next round on; nodes that did not reply are left out for some rounds.

        Parameters
        ----------
        messages : sequence of Message
            Those of `ask_training` and `ask_evaluation`, from the same hypotheses.
        timeout : float
            In seconds.
        """
        exchange, messages = self.exchange_on(grid), merged(messages)
        if self._roster is not None:
            self._look(grid, round)
        answers = exchange.run(
            [*messages, *self._invitations(round, exchange)],
            timeout,
            _quorum(self.run.quorum, messages),
            keep_late=("query",),
            name=f"round {round}",
        )
        self.dropped += exchange.dropped
        silent: set[int] = set(exchange.silent)
        refused: dict[int, str] = {}
        trainers = {node for node, hosting in self._roster.nodes if hosting.train} if self._roster else set()
        reporting = trainers.difference(one.metadata.dst_node_id for one in messages if numbers_asked(one.content)[0])
        for answer in answers:
            if answer.kind == "query":
                self._welcome(answer, exchange.transport.together)
            elif answer.reply.has_error():
                reason, name = as_line(answer.reply.error.reason), exchange.names[answer.node]
                log(WARNING, "%s did not reply to the message of round %d: %s", name, round, reason)
                if answer.gone:
                    silent.add(answer.node)
                # A new process may well reply after a crash, and a site that does not report may train.
                elif answer.reply.error.code != ErrorCode.CLIENT_APP_CRASHED and answer.node not in reporting:
                    refused[answer.node] = code_in(reason)
        asked = [answer for answer in answers if answer.kind != "query"]
        replied = {answer.node for answer in asked} - silent - set(refused)
        self.unanswered = bool(silent) and not replied and self.waits(grid)
        self._unanswered_since = min(self._unanswered_since, time.monotonic()) if self.unanswered else math.inf
        if self._roster:
            self._roster.note(round, replied, silent, refused)
        replies = [answer.reply for answer in asked]
        return replies, replies

    def send_best(
        self, grid: Grid, hypotheses: Arrays, timeout: float, run: str = "", prior: Arrays | None = None
    ) -> None:
        """Send the run's result to all nodes, which may keep it; they reply nothing."""
        content = keep_request(pack(hypotheses), run, prior)
        messages = [Message(content, node, "query.keep", group_id="keep") for node, _ in self.roster(grid).nodes]
        self.exchange_on(grid).run(messages, min(timeout, _KEEP_S))

    # --- reading

    def read(self, asked: Asked, replies: Iterable[Message]) -> Any:
        """Return what came back of the clients that were asked: `Releases`, `Sums`, or `Scores`; None without these.

        Participations are counted, also those of clients whose releases are left out.
        """
        found = self.channel(asked.task).read(asked, replies)
        if isinstance(found, Releases | Sums):
            self.dropped += len(found.outside)
            for clients in (found.clients, found.outside):
                self.participations[clients] += 1
        return found

    def evaluation(self, asked: Asked, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the fields of the scores in the replies to `ask_evaluation` as metrics; None without valid replies."""
        scores = self.read(asked, replies)
        return None if scores is None else filled(MetricRecord(), vars(scores))

    # --- as channels see it

    @property
    def known(self) -> Roster:
        """The nodes and their clients, once they were asked."""
        assert self._roster is not None
        return self._roster

    def stage(self, name: str, contents: Mapping[int, RecordDict], enough: int) -> dict[int, RecordDict]:
        """Ask nodes something besides a round's message; return what they reply, once enough have replied."""
        assert self._exchange is not None
        return self._exchange.stage(name, contents, enough, self.run.round_timeout)

    # --- nodes that join

    def _invitations(self, round: int, exchange: Exchange) -> list[Message]:
        """Ask nodes outside the run for their clients: new ones at once, those that refused some rounds later."""
        if self._roster is None or self._roster.simulated:
            return []
        asked = {node for node, absence in self._invited.items() if round <= absence.until}
        asked |= exchange.awaited("query")
        new = [node for node in sorted(self._connected) if node not in self._roster and node not in asked]
        self._invited |= {node: Absence.following(self._invited.get(node), round) for node in new}
        return [Message(query(), node, "query", group_id="query") for node in new]

    def _welcome(self, answer: Answer, together: bool) -> None:
        assert self._roster is not None
        if answer.gone:
            self._invited.pop(answer.node, None)  # to be asked again
        names = self._roster.names
        hosting = hosting_of(answer, self.run.per_node.clients, together, names, self._roster)
        if hosting is None:
            return
        self._roster.join({answer.node: hosting})
        new = np.zeros(hosting.train, np.int64)
        self.participations = np.concatenate([self.participations, new])
        self._turns = np.concatenate([self._turns, new])
        text = "%s joins, with %d training and %d validation clients"
        log(INFO, text, names[answer.node], hosting.train, hosting.validation)


def _quorum(share: float, messages: Sequence[Message]) -> Callable[[Sequence[Answer]], bool]:
    """Return whether so large a share of the clients has replied that messages ask to train, and to evaluate."""
    if share >= 1:
        return lambda _: False
    asked = {
        one.metadata.dst_node_id: (training_in(one.content), evaluation_in(one.content)) for one in messages
    }  # fmt: skip
    least = share * np.sum([(0, 0), *(numbers_asked(one.content) for one in messages)], axis=0)

    def enough(answers: Sequence[Answer]) -> bool:
        replied = np.zeros(2)
        for answer in answers:
            if answer.kind != "query" and not answer.reply.has_error():
                with suppress(Exception):  # it is read once more after the round, and then the reason is logged
                    content, tasks = answer.reply.content, asked[answer.node]
                    replied += [load(one.channel).answered(one, content) if one else 0 for one in tasks]
        return bool((replied >= least).all())

    return enough
