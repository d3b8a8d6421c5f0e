"""The clients of a run, as a strategy sees them: sampling, messages and replies.

`umbel.nodes.exchange` sends the messages and waits, and `umbel.nodes.replies` checks the replies. On the
node a message comes to `umbel.client.app`, behind the gate (`umbel.privacy.gate.umbel_app`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from logging import INFO, WARNING
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from umbel.models.prior import Prior
from umbel.nodes.bounds import count_deviation, furthest, furthest_sum
from umbel.nodes.differences import look
from umbel.nodes.exchange import Answer, Exchange
from umbel.nodes.presence import Absence
from umbel.nodes.replies import Asked, read_releases, read_scores, read_sums
from umbel.nodes.roster import MORE_NODES, TRAIN, VALIDATION, Roster, check_enough, gather, hosting_of
from umbel.nodes.secure import NO_REPORTS, Together, summed, terms_of
from umbel.nodes.transport import transport_of
from umbel.nodes.words import Names, code_in, told
from umbel.protocol.arrays import Arrays, Labels, Matrix, Vectors, as_matrix
from umbel.protocol.clients import ClientInRun, ClientOnNode
from umbel.protocol.errors import FleetError
from umbel.protocol.flower import ErrorCode, log
from umbel.protocol.messages import (
    answers_training,
    asks,
    keep_request,
    merged,
    number_released,
    number_reported,
    query,
    round_request,
)
from umbel.protocol.polling import pause
from umbel.protocol.records import from_array_record, pack, to_array_record, unpack
from umbel.protocol.release import ReleaseBy
from umbel.protocol.releases import Releases, Scores, Sums, Total
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import EvaluationSpec, Hosting, TrainingSpec
from umbel.protocol.words import at_time, in_time

# Keys that separate the server's draws for different purposes.
_SAMPLE_TRAIN, _SAMPLE_VALIDATION = 1, 2
_KEEP_S = 300.0  # seconds for which a run that is over waits for its nodes to be told
_POLL_S = 5.0  # maximum seconds between two looks for nodes in a pause
_TELL_S = 600.0  # between two lines about a pause


@dataclass
class _Joint:
    """A round's secure sum: who was asked, the messages that ask for training, and its total once it is there."""

    round: int
    training: Asked
    reporting: Asked | None = None
    messages: list[Message] = field(default_factory=list)
    total: Total | None = None

    @property
    def nodes(self) -> set[int]:
        """The nodes in the sum."""
        return {*self.training.positions, *(self.reporting.positions if self.reporting else ())}


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
        self.clients_per_round = self.run.clients_per_round
        self.metric_is_share = False
        """Whether the metric is one from 0 to 1, as an accuracy."""
        self.participations: NDArray[np.int64] = np.zeros(0, np.int64)
        """Number of releases of each training client."""
        self._turns: NDArray[np.int64] = np.zeros(0, np.int64)  # how often each was asked
        self._roster: Roster | None = None
        self._exchange: Exchange | None = None
        self._invited: dict[int, Absence] = {}
        self._looked = -1
        self._connected: set[int] = set()
        self._training: Asked | None = None
        self._evaluation: Asked | None = None
        self.unanswered = False
        """Whether no node replied to the last round, and some may only be away. Nodes that all refuse are not."""
        self._unanswered_since = math.inf  # by the clock of `time.monotonic`
        self.sent: Arrays = {}
        """The hypotheses of the last `ask_training`."""
        self._opened: tuple[dict[str, Array], Arrays, ArrayRecord] = {}, {}, ArrayRecord()
        self.task = TrainingSpec()
        """The task of the last `ask_training` for all clients, without round and clients."""
        self._furthest = 0.0
        self._outside = self._earlier = 0
        self._exchanged = -1
        self._together: Together | None = None
        self._joint: _Joint | None = None

    def roster(self, grid: Grid) -> Roster:
        """Return the nodes and their clients, asking them the first time."""
        if self._roster is None:
            roster = gather(self.exchange_on(grid), self.run)
            check_enough("clients-per-round", self.clients_per_round, roster.train)
            check_enough("validation-clients-per-round", self.run.validation_clients_per_round, roster.validation)
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

    def ask_training(
        self,
        round: int,
        hypotheses: ArrayRecord,
        config: TrainingSpec | Mapping[str, Any],
        grid: Grid,
        decisions: Mapping[str, Any] = MappingProxyType({}),
        clients: NDArray[np.int64] | None = None,
    ) -> list[Message]:
        """Return the messages that ask clients to train, one for each node.

        Parameters
        ----------
        hypotheses : ArrayRecord
            The hypotheses to start from.
        config : TrainingSpec or mapping
            The task of all clients, or some of its fields; clip norm, round and clients are filled in here.
        decisions : mapping
            Fields of the task that the strategy decides.
        clients : ndarray of int, optional
            The clients to ask, in increasing order; by default the round's sample.
        """
        task = config if isinstance(config, TrainingSpec) else self.task_of(round, config, decisions)
        roster = self._look(grid, round)
        if clients is None:
            clients = self._draw(roster, round)
        placed, self.task = roster.place(TRAIN, clients), task
        self.sent, packed = self.opened(hypotheses)
        rows = None if task.release_by is ReleaseBy.CLIENT else len(next(iter(self.sent.values())))
        self._training = _asked(clients, placed, roster.names, task.disclose_choice, rows)
        self._furthest = furthest(task, as_matrix(self.sent), self.run.limits.update_norm)
        asked = {node: task.asking(round, locals_) for node, (_, locals_) in placed.items()}
        return [
            Message(round_request(packed, training=one), node, "train", group_id=str(round))
            for node, one in asked.items()
        ]

    def task_of(self, round: int, config: Mapping[str, Any], decisions: Mapping[str, Any]) -> TrainingSpec:
        """Return the task for all clients of a round."""
        clip = {"clipping": str(self.run.schedule.mode), "clip_norm": self.run.schedule.at(round)}
        return TrainingSpec.of_config({**config, **clip, **decisions})

    def together(
        self,
        round: int,
        messages: Sequence[Message],
        colluding: int,
        least: int,
        reports: EvaluationSpec = NO_REPORTS,
    ) -> list[Message]:
        """Return the messages of the last `ask_training`, or `ask_evaluation`, to nodes that add their sums securely.

        A round's evaluation joins the sum of its training, which comes first. If clients of too few nodes were drawn,
        others take part with noise and masks alone.

        Parameters
        ----------
        colluding, least : int
            See `umbel.privacy.secure.terms.Terms`.
        reports : EvaluationSpec
            How reports are summed; the same in all rounds.

        Raises
        ------
        FleetError
            If a run has fewer nodes than `least`.
        """
        exchange, roster, joint = self._exchange, self._roster, self._joint
        assert exchange is not None
        assert roster is not None
        if len(roster) < least:
            text = f"a secure sum needs at least {least} sites, and there are {len(roster)}; start more"
            raise FleetError(f"{text}, in simulation by {MORE_NODES}", code="nodes.too-few-parties")
        clients = self.clients_per_round, self.run.validation_clients_per_round or roster.validation
        terms = terms_of(self.task, self.sent, clients[0], len(roster), colluding, least, reports, clients[1])
        if self._together is None or self._together.terms != terms:
            self._together = Together(terms, exchange, self.run.round_timeout)
        evaluates = any(asks(message.content)[1] for message in messages)
        if not evaluates:
            assert self._training is not None
            joint = _Joint(round, self._training)
        elif joint is None or joint.round != round:
            joint = _Joint(round, Asked(np.zeros(0, np.int64), {}, names=roster.names))
        joint.reporting = self._evaluation if evaluates else None
        idle = roster.idle(joint.nodes, round)[: max(0, least - len(joint.nodes))]
        joint.training.positions.update((node, np.zeros(0, np.int64)) for node in idle)
        packed = self._opened[2]
        joining = [Message(round_request(packed), node, "train", group_id=str(round)) for node in idle]
        invited = self._together.invite([*joint.messages, *messages, *joining], round)
        if not evaluates:
            joint.messages = invited
        self._joint = joint
        sent = {id(message) for message in joint.messages} if evaluates else ()
        return [message for message in invited if id(message) not in sent]

    def ask_evaluation(
        self,
        round: int,
        hypotheses: ArrayRecord,
        config: EvaluationSpec | Mapping[str, Any],
        grid: Grid,
        group: str = "",
    ) -> list[Message]:
        """Return messages that ask a sample of the validation clients to score the hypotheses, one for each node."""
        task = config if isinstance(config, EvaluationSpec) else EvaluationSpec.of_config(config)
        roster = self._look(grid, round)
        seed = [self.run.seed, _SAMPLE_VALIDATION, round]
        clients = roster.draw(VALIDATION, round, seed, self.run.validation_clients_per_round or roster.validation)
        if not len(clients):
            self._evaluation = None
            return []
        placed = roster.place(VALIDATION, clients)
        self._evaluation = _asked(clients, placed, roster.names)
        _, packed = self.opened(hypotheses)
        asked = {node: task.asking(round, locals_) for node, (_, locals_) in placed.items()}
        return [
            Message(round_request(packed, evaluation=one), node, "evaluate", group_id=group or str(round))
            for node, one in asked.items()
        ]

    def record(self, hypotheses: Arrays) -> ArrayRecord:
        """Return hypotheses as the record from which a round's messages are made."""
        record = to_array_record(hypotheses)
        self._remember(record, hypotheses)
        return record

    def _remember(self, record: ArrayRecord, hypotheses: Arrays) -> None:
        packed = pack(hypotheses)
        self._opened = dict(record.items()), unpack(packed), packed

    def begin(self, arrays: ArrayRecord) -> None:
        """Take the hypotheses from which a round starts, however its messages are made."""
        self.sent, _ = self.opened(arrays)

    def opened(self, hypotheses: ArrayRecord) -> tuple[Arrays, ArrayRecord]:
        """Return the hypotheses as arrays and as they travel; done once for a round's training and evaluation."""
        known = self._opened[0]
        # Compared by arrays: a strategy may put others into the same record.
        if len(known) != len(hypotheses) or any(known.get(name) is not one for name, one in hypotheses.items()):
            self._remember(hypotheses, from_array_record(hypotheses))
        return self._opened[1:]

    @property
    def used_up(self) -> bool:
        """Whether every training client has reached its maximum number of participations."""
        return len(self._turns) > 0 and 0 < self.run.max_participations <= int(self._turns.min())

    def waits(self, grid: Grid) -> bool:
        """Return whether the run waits for nodes that are away: not in simulation, and not before its first release."""
        return not self.exchange_on(grid).transport.together and bool(self.participations.any())

    def wait(self, round: int, grid: Grid, paused: Callable[[float, float], None] = lambda *_: None) -> None:
        """Wait until enough nodes are there for a round.

        They are as many as the run config's ``pause`` says, one of them with training clients. In simulation lost nodes
        do not return. Before the first release of a run, a node that refuses is more likely to disagree with the run
        config than to be away.

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
        now, told, least = time.monotonic(), -math.inf, self.run.pauses.below
        # Otherwise a round whose nodes are connected, and never reply, would be repeated without end.
        began = min(now, self._unanswered_since)
        since = time.time() - (now - began)
        while not roster.enough(round, least):
            waited = time.monotonic() - began
            waits_for = f"for {roster.missing(round)}" if roster.left_out(round) else "for more nodes"
            if waited >= self.run.pauses.seconds:
                raise FleetError(
                    f"round {round} waited {in_time(waited)} {waits_for}, since fewer than the {least} below which "
                    "it pauses can be asked; the run can be resumed when they are back, or with a lower pause",
                    code="nodes.away",
                )
            if waited - told >= _TELL_S:
                told = waited
                text = "Paused before round %d since %s: %d of %d nodes can be asked. Waiting %s, at most until %s"
                left, end = len(roster) - roster.left_out(round), since + self.run.pauses.seconds
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
        if again or exchange.transport.together or self._looked != round:
            self._looked, self._connected = round, exchange.connected()
            roster.see(self._connected, exchange.late(keep_late=("query",)))
        return roster

    def _draw(self, roster: Roster, round: int) -> NDArray[np.int64]:
        """Draw the training clients of a round."""
        seed = [self.run.seed, _SAMPLE_TRAIN, round]
        if not self.run.max_participations:
            return roster.draw(TRAIN, round, seed, self.clients_per_round)
        # Requests count, not releases: otherwise clients that refuse would always be asked first.
        clients = roster.in_turn(round, seed, self.clients_per_round, self._turns, self.run.max_participations)
        self._turns[clients] += 1
        return clients

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
        self._earlier, self._outside, self._exchanged = self.dropped if round == self._exchanged else 0, 0, round
        exchange, messages = self.exchange_on(grid), merged(messages)
        if self._roster is not None:
            self._look(grid, round)
        answers = exchange.run(
            [*messages, *self._invitations(round, exchange)],
            timeout,
            lambda answers: self._enough(answers, messages),
            keep_late=("query",),
            name=f"round {round}",
        )
        silent: set[int] = set(exchange.silent)
        refused: dict[int, str] = {}
        trainers = {node for node, hosting in self._roster.nodes if hosting.train} if self._roster else set()
        reporting = trainers.difference(one.metadata.dst_node_id for one in messages if asks(one.content)[0])
        for answer in answers:
            if answer.kind == "query":
                self._welcome(answer, exchange.transport.together)
            elif answer.reply.has_error():
                reason, name = told(answer.reply.error.reason), exchange.names[answer.node]
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
        self, grid: Grid, hypotheses: Arrays, timeout: float, run: str = "", prior: Prior | None = None
    ) -> None:
        """Send the run's result to all nodes, which may keep it; they reply nothing."""
        content = keep_request(pack(hypotheses), run, None if prior is None else prior.arrays)
        messages = [Message(content, node, "query.keep", group_id="keep") for node, _ in self.roster(grid).nodes]
        self.exchange_on(grid).run(messages, min(timeout, _KEEP_S))

    @property
    def dropped(self) -> int:
        """Number of useless replies in the last round, and of releases too far from the hypotheses."""
        return self._earlier + (self._exchange.dropped if self._exchange else 0) + self._outside

    # --- reading

    def releases(self, replies: Iterable[Message]) -> Releases:
        """Return the releases in the replies to the last `ask_training`, and count participations."""
        asked, answers = self._answers(replies)
        found = read_releases(answers, asked, self.sent, self._furthest)
        self._note(found.clients, found.outside)
        return found

    @property
    def count_deviation(self) -> float:
        """Standard deviation of the noise on each count of the sums that the last `ask_training` asked for."""
        return count_deviation(self.task)

    def sums(self, replies: Iterable[Message]) -> Sums:
        """Return the sums in the replies to the last `ask_training`, if sites were asked for them; count as above."""
        asked, answers = self._answers(replies)
        k, n = as_matrix(self.sent).shape
        most = partial(furthest_sum, self.task, k, n, most=self.run.limits.update_norm)
        found = read_sums(answers, asked, self.sent, most)
        self._note(found.clients, found.outside)
        return found

    def secure_sum(self, round: int, replies: Iterable[Message], reports: EvaluationSpec = NO_REPORTS) -> Total:
        """Return the secure sum over the nodes that replied to the messages of `together`; count as above."""
        joint = self._joint
        assert self._together is not None, "together comes first"
        assert joint is not None
        if joint.total is None:
            usable = _usable(replies, joint.nodes)
            answers = {node: reply for node, reply in usable.items() if answers_training(reply.content)}
            reporting = joint.reporting if reports.summed else None
            joint.total = summed(
                self._together, round, self.task, self.sent, joint.training, answers, reports, reporting
            )
            self._note(joint.total.sums.clients, joint.total.sums.outside)
        return joint.total

    def _answers(self, replies: Iterable[Message]) -> tuple[Asked, dict[int, Message]]:
        """Return the clients that the last `ask_training` asked, and one usable reply of each node."""
        asked = self._training
        assert asked is not None
        usable = _usable(replies, asked.positions)
        return asked, {node: reply for node, reply in usable.items() if answers_training(reply.content)}

    def _note(self, inside: NDArray[np.int64], outside: NDArray[np.int64]) -> None:
        """Count participations, also of clients whose releases are left out."""
        self._outside += len(outside)
        for clients in (inside, outside):
            self.participations[clients] += 1

    def train_metrics(self, replies: Iterable[Message]) -> Mapping[str, Any]:
        """Return nothing: all that leaves umbel's clients is their releases."""
        return {}

    def look(self, state: dict[str, NDArray[Any]], releases: Vectors, labels: Labels, hypotheses: Matrix) -> None:
        """Estimate how clients differ from a round's releases (`umbel.nodes.differences`), for the nodes' result."""
        look(state, releases, labels, hypotheses, self.task)

    def evaluation(self, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the fields of `scores` as metrics; None without valid replies."""
        scores = self.scores(replies)
        return None if scores is None else MetricRecord(asdict(scores))

    def scores(self, replies: Iterable[Message]) -> Scores | None:
        """Return the scores in the replies to the last `ask_evaluation`; None without valid replies."""
        if (asked := self._evaluation) is None:
            return None
        return read_scores(_usable(replies, asked.positions), asked, self.run.validate_by, self.metric_is_share)

    def _enough(self, answers: Sequence[Answer], messages: Sequence[Message]) -> bool:
        """Return whether a quorum of the asked clients has replied."""
        if self.run.quorum >= 1:
            return False
        own = [answer for answer in answers if answer.kind != "query" and not answer.reply.has_error()]
        counts = (self._training, number_released), (self._evaluation, number_reported)
        for part, (asked, count) in enumerate(counts):
            if asked is None or not any(asks(message.content)[part] for message in messages):
                continue
            if sum(_counted(count, one, asked) for one in own) < self.run.quorum * len(asked.clients):
                return False
        return True

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
        hosting = hosting_of(answer, self.run.limits.clients, together, names, self._roster)
        if hosting is None:
            return
        self._roster.join({answer.node: hosting})
        new = np.zeros(hosting.train, np.int64)
        self.participations = np.concatenate([self.participations, new])
        self._turns = np.concatenate([self._turns, new])
        text = "%s joins, with %d training and %d validation clients"
        log(INFO, text, names[answer.node], hosting.train, hosting.validation)


def _asked(
    clients: NDArray[np.int64],
    placed: Mapping[int, tuple[list[int], list[ClientOnNode]]],
    names: Names,
    disclose: bool = False,
    rows: int | None = None,
) -> Asked:
    positions = {node: np.array(its) for node, (its, _) in placed.items()}
    return Asked(clients, positions, disclose, rows, names)


def _counted(count: Callable[..., int], answer: Answer, asked: Asked) -> int:
    """Return how many of the asked clients have released, or reported, according to a reply."""
    rows = () if asked.rows is None else (asked.rows,)
    try:
        return count(answer.reply.content, len(asked.positions.get(answer.node, ())), *rows)
    except Exception:  # it is read once more after the round, and then the reason is logged
        return 0


def _usable(replies: Iterable[Message], asked: Container[int]) -> dict[int, Message]:
    """Return one usable reply for each node, without errors, repeats, and nodes that were not asked."""
    answers: dict[int, Message] = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if not reply.has_error() and node in asked:  # `exchange` logs the errors
            answers.setdefault(node, reply)
    return answers
