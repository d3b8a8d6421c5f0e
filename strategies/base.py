"""The strategy that all of umbel's are built on.

To write one of your own, subclass `HypothesisStrategy` or one of its children and override
`assign` (which hypothesis does each release belong to?) or `combine` (what becomes of a
group?), then name it in the run config: ``strategy = "package.module:Class"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log
from numpy.typing import NDArray

from models.base import Model
from protocol import (
    ARRAYS,
    COUNTS,
    SCORES,
    Arrays,
    Demand,
    Hosting,
    ProtocolError,
    all_finite,
    evaluate_request,
    flatten,
    from_array_record,
    keep_request,
    query,
    record_in,
    to_array_record,
    train_request,
    unflatten,
)
from strategies.exchange import Answer, Exchange
from strategies.options import Options
from strategies.roster import TRAIN, VALIDATION, Roster, check_enough, gather

# Keys that keep the server's draws for different purposes apart.
_SAMPLE_TRAIN, _SAMPLE_VALIDATION = 1, 2
_PROBING = 3600.0  # seconds for which a probe's answer is waited for
_TELLING = 300.0  # seconds for which a run that is over waits for its nodes to be told
_PLANE = 2  # releases of so many parameters can be drawn in the plane


@dataclass(frozen=True)
class RadiusSchedule:
    """The radius asked for in round t.

    Mode ``update``: `floor`. Mode ``public``: ``start * decay**(t - 1)``, at least `floor`.
    """

    mode: str = "update"
    floor: float = 0.01
    start: float = 1.0
    decay: float = 1.0

    def at(self, round: int) -> float:
        """Return the radius of a round, counted from 1."""
        return self.floor if self.mode == "update" else max(self.start * self.decay ** (round - 1), self.floor)


@dataclass(frozen=True)
class _Asked:
    """The clients a kind of message went to: for each node, their positions in the sample."""

    clients: NDArray[np.int64]
    positions: dict[int, NDArray[np.int64]]
    disclose: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a round of training gave the server, which is all that it can learn from it.

    Attributes
    ----------
    round : int
    clients : ndarray of int, shape (m,)
        The training clients that released.
    groups : ndarray of int, shape (m,)
        The hypothesis that each release was assigned to; -1 when there were too few releases.
    releases : ndarray, shape (m, 2), or None
        The releases themselves where they are of two parameters.
    """

    round: int
    clients: NDArray[np.int64]
    groups: NDArray[np.int64]
    releases: NDArray[np.float64] | None


class HypothesisStrategy(Strategy):
    """Federated training of k hypotheses (group privacy paper, Algorithm 1).

    Clients are sampled over all nodes and their replies put in client order before anything is
    computed, so the result does not depend on how many nodes there are or who answers first.

    Parameters
    ----------
    hypotheses : int
        k, the number of hypotheses.
    clients_per_round : int
        U, the number of training clients asked in a round.
    validation_clients_per_round : int
        Number of validation clients asked; 0 for all.
    min_releases : int
        A round with fewer releases leaves the hypotheses as they are.
    quorum : float
        Share of the asked clients with whose answers a round closes; 1 waits for all of them, or
        until time is up.
    radius : RadiusSchedule
        Radius within which updates are hidden.
    seed : int
        Of the server's sampling.
    min_nodes : int
        Number of nodes to wait for.
    node_wait : float
        Seconds to wait for them.
    """

    fixed_hypotheses: ClassVar[int | None] = None
    """The only number of hypotheses the strategy can train, if there is one."""
    discloses_choice: ClassVar[bool] = False
    """Whether clients are asked for the hypothesis they chose."""

    def __init__(
        self,
        *,
        hypotheses: int = 2,
        clients_per_round: int = 7,
        validation_clients_per_round: int = 0,
        min_releases: int = 1,
        quorum: float = 1.0,
        radius: RadiusSchedule | None = None,
        seed: int = 0,
        min_nodes: int = 1,
        node_wait: float = 300.0,
    ) -> None:
        self.hypotheses = self.fixed_hypotheses or hypotheses
        self.clients_per_round = clients_per_round
        self.validation_clients_per_round = validation_clients_per_round
        self.min_releases = min_releases
        self.quorum = quorum
        self.radius = radius or RadiusSchedule()
        self.seed = seed
        self.min_nodes = min_nodes
        self.node_wait = node_wait
        self.participations: NDArray[np.int64] = np.zeros(0, np.int64)
        """How often each training client has released."""
        self.outcome: Outcome | None = None
        """Of the last round."""
        self.finished = ""
        """Why the strategy wants no more rounds; empty while it does."""
        self.remarks: list[str] = []
        """What it has to say at the end of the run, a sentence each."""
        self.findings: list[dict[str, Any]] = []
        """Rows of a table for the run's folder."""
        self._roster: Roster | None = None
        self._current: Arrays = {}
        self._asked: dict[str, _Asked] = {}
        self._exchange = Exchange()
        self._invited: set[int] = set()

    def prepare(self, options: Options, model: Model) -> None:
        """Read what else the strategy needs of the run config; called once, before any work.

        Raises
        ------
        ConfigError
            When it cannot run; the text names the key and the fix.
        """

    def assign(
        self, releases: NDArray[np.float64], hypotheses: NDArray[np.float64], choices: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """Return the hypothesis each release belongs to.

        Parameters
        ----------
        releases : ndarray, shape (m, n)
            Sanitised parameter vectors, in client order.
        hypotheses : ndarray, shape (k, n)
            The hypotheses that were broadcast.
        choices : ndarray of int, shape (m,), or None
            What the clients chose, if the strategy `discloses_choice`.

        Returns
        -------
        ndarray of int, shape (m,)
        """
        raise NotImplementedError

    def combine(self, group: NDArray[np.float64], hypothesis: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the next hypothesis: the mean of the releases assigned to it.

        Parameters
        ----------
        group : ndarray, shape (g, n)
            The releases, in client order.
        hypothesis : ndarray, shape (n,)
            As it was broadcast.

        Returns
        -------
        ndarray, shape (n,)
        """
        mean: NDArray[np.float64] = group.mean(axis=0)
        return mean

    def roster(self, grid: Grid) -> Roster:
        """Return the nodes and their clients, asking them the first time."""
        if self._roster is None:
            roster = gather(grid, self.min_nodes, self.node_wait, self._exchange)
            check_enough("clients-per-round", self.clients_per_round, roster.train)
            check_enough("validation-clients-per-round", self.validation_clients_per_round, roster.validation)
            check_enough("min-releases", self.min_releases, self.clients_per_round)
            self.participations = np.zeros(roster.train, np.int64)
            self._roster = roster
        return self._roster

    def resume(self, grid: Grid, nodes: Sequence[tuple[int, Hosting]], spent: Mapping[int, int]) -> None:
        """Go on with a run.

        Parameters
        ----------
        grid : Grid
        nodes : sequence of (int, Hosting)
            The nodes that there were, in the order of their clients.
        spent : mapping from int to int
            How often each client that released did so.
        """
        self._roster = Roster.resumed(nodes, self.roster(grid))
        self.participations = np.zeros(self._roster.train, np.int64)
        self.participations[list(spent)] = list(spent.values())

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask a sample of the training clients to train; `config` holds what a `Demand` needs besides."""
        roster = self.roster(grid)
        seed = [self.seed, _SAMPLE_TRAIN, server_round]
        clients = roster.draw(TRAIN, server_round, seed, self.clients_per_round)
        return self._demand(server_round, arrays, config, grid, clients)

    def _demand(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: Mapping[str, Any],
        grid: Grid,
        clients: NDArray[np.int64],
        disclose: bool = False,
    ) -> list[Message]:
        """Ask given clients to train from `arrays`."""
        disclose = disclose or self.discloses_choice
        placed = self._ask("train", clients, self.roster(grid).place(TRAIN, clients), disclose)
        self._current = from_array_record(arrays)
        common: dict[str, Any] = {
            **config,
            "round": server_round,
            "radius_mode": self.radius.mode,
            "radius": self.radius.at(server_round),
            "disclose_choice": disclose,
        }
        return [
            Message(
                train_request(arrays, Demand(**common, clients=tuple(locals_))),
                node,
                "train",
                group_id=str(server_round),
            )
            for node, (_, locals_) in placed.items()
        ]

    def exchange(self, server_round: int, grid: Grid, messages: Sequence[Message], timeout: float) -> list[Message]:
        """Send a round's messages and return the replies that came in time.

        The round closes when a `quorum` of its clients has answered, or time is up. Nodes that came
        later are asked what they host and take part from the next round on; nodes that did not
        answer are left out for some rounds.

        Parameters
        ----------
        server_round : int
        grid : Grid
        messages : sequence of Message
            Of type train and evaluate.
        timeout : float
            In seconds.
        """
        answers = self._exchange.run(
            grid,
            [*messages, *self._invitations(grid)],
            timeout,
            lambda answers: self._enough(answers, messages),
            keep_late=("query",),
        )
        silent = set(self._exchange.silent)
        for answer in answers:
            if answer.kind == "query":
                self._welcome(answer)
            elif answer.reply.has_error():
                reason = answer.reply.error.reason
                log(WARNING, "node %s did not answer a message of type %s: %s", answer.node, answer.kind, reason)
                if answer.gone:
                    silent.add(answer.node)
        asked = [answer for answer in answers if answer.kind != "query"]
        if self._roster:
            self._roster.note(server_round, {answer.node for answer in asked} - silent, silent)
        return [answer.reply for answer in asked]

    def tell(self, grid: Grid, hypotheses: Arrays, timeout: float) -> None:
        """Tell all nodes what the run has found, for them to keep; what they make of it they do not say."""
        content = keep_request(to_array_record(hypotheses))
        messages = [Message(content, node, "query.keep", group_id="keep") for node, _ in self.roster(grid).nodes]
        self._exchange.run(grid, messages, min(timeout, _TELLING))

    @property
    def dropped(self) -> int:
        """Replies in the last round that came late, twice or unasked."""
        return self._exchange.dropped

    def _enough(self, answers: Sequence[Answer], messages: Sequence[Message]) -> bool:
        """Return whether a quorum of the clients that were asked has answered."""
        if self.quorum >= 1:
            return False
        for kind in {message.metadata.message_type for message in messages}:
            asked = self._asked[kind]
            own = [answer for answer in answers if answer.kind == kind and not answer.reply.has_error()]
            if kind == "train":
                there = sum(sum(_released(answer.reply)) for answer in own)
            else:
                there = sum(len(asked.positions.get(answer.node, ())) for answer in own)
            if there < self.quorum * len(asked.clients):
                return False
        return True

    def _invitations(self, grid: Grid) -> list[Message]:
        """Ask nodes that were not there before what they host."""
        if self._roster is None or self._roster.simulated:
            return []
        asked = self._invited | self._exchange.awaited("query")
        new = [node for node in grid.get_node_ids() if node not in self._roster and node not in asked]
        self._invited.update(new)
        return [Message(query(), node, "query", group_id="query") for node in new]

    def _welcome(self, answer: Answer) -> None:
        assert self._roster is not None
        if answer.gone:
            self._invited.discard(answer.node)  # to be asked again
        try:
            if answer.reply.has_error():
                raise ProtocolError(answer.reply.error.reason)
            hosting = Hosting.from_record(record_in(answer.reply.content, COUNTS, MetricRecord))
            if hosting.simulated:
                raise ProtocolError("it says that it is simulated")
        except (KeyError, ProtocolError) as error:
            log(WARNING, "node %s cannot take part: %s", answer.node, error)
            return
        self._roster.join({answer.node: hosting})
        self.participations = np.concatenate([self.participations, np.zeros(hosting.train, np.int64)])
        log(
            INFO,
            "node %s joins, with %d training and %d validation clients",
            answer.node,
            hosting.train,
            hosting.validation,
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Assign the releases to hypotheses and combine each group.

        Returns
        -------
        ArrayRecord or None
            The next hypotheses; None when fewer than `min_releases` clients released. A
            hypothesis without releases stays as it was.
        MetricRecord
            ``asked``, ``releases``, ``lost-nodes``, and ``groups``: releases a hypothesis.
        """
        asked = self._asked["train"]
        releases, positions, choices, lost = self._collect(replies, asked)
        self.participations[asked.clients[positions]] += 1
        groups = np.zeros(self.hypotheses, np.int64)
        following = None
        labels = np.full(len(releases), -1, np.int64)
        if len(releases) >= self.min_releases and len(releases):
            hypotheses = flatten(self._current)
            labels = self.assign(releases, hypotheses, choices)
            groups = np.bincount(labels, minlength=self.hypotheses)
            moved = hypotheses.copy()
            for j in np.flatnonzero(groups):
                moved[j] = self.combine(releases[labels == j], hypotheses[j])
            following = to_array_record(unflatten(moved, self._current))
        plane = releases if releases.shape[1] == _PLANE else None
        self.outcome = Outcome(server_round, asked.clients[positions], labels, plane)
        metrics = MetricRecord(
            {
                "asked": len(asked.clients),
                "releases": len(releases),
                "lost-nodes": lost,
                "groups": [int(count) for count in groups],
            }
        )
        return following, metrics

    def probe(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: Mapping[str, Any],
        grid: Grid,
        clients: NDArray[np.int64],
        disclose: bool,
    ) -> tuple[NDArray[np.float64], NDArray[np.int64] | None]:
        """Ask given clients for an update that does not enter training; not counted in `participations`.

        Returns
        -------
        releases : ndarray, shape (m, n)
            Of those that released, in client order.
        choices : ndarray of int, shape (m,), or None
            What they chose, if asked to `disclose` it.
        """
        messages = self._demand(server_round, arrays, config, grid, clients, disclose)
        replies = [answer.reply for answer in Exchange().run(grid, messages, _PROBING)]
        releases, _, choices, _ = self._collect(replies, self._asked["train"])
        return releases, choices

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask a sample of the validation clients to score the hypotheses."""
        roster = self.roster(grid)
        seed = [self.seed, _SAMPLE_VALIDATION, server_round]
        clients = roster.draw(VALIDATION, server_round, seed, self.validation_clients_per_round or roster.validation)
        if not len(clients):
            return []
        placed = self._ask("evaluate", clients, roster.place(VALIDATION, clients))
        return [
            Message(evaluate_request(arrays, server_round, locals_), node, "evaluate", group_id=str(server_round))
            for node, (_, locals_) in placed.items()
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average loss and metric over the validation clients that answered, each counting once.

        Returns
        -------
        MetricRecord or None
            ``loss``, ``metric`` and ``clients``; None when nobody answered.
        """
        asked = self._asked.get("evaluate")
        if asked is None:
            return None
        scores = np.full((2, len(asked.clients)), np.nan)
        for node, reply in self._answers(replies, asked).items():
            record = reply.content.get(SCORES)
            if not isinstance(record, MetricRecord):
                continue
            positions = asked.positions[node]
            for row, name in enumerate(("loss", "metric")):
                values = record.get(name)
                if isinstance(values, list) and len(values) == len(positions):
                    scores[row, positions] = values
        answered = np.isfinite(scores).all(axis=0)
        if not answered.any():
            return None
        # In client order, so that rounding does not depend on the nodes.
        loss, metric = scores[:, answered].mean(axis=1)
        return MetricRecord({"loss": float(loss), "metric": float(metric), "clients": int(answered.sum())})

    def summary(self) -> None:
        """Log what the strategy does."""
        log(
            INFO,
            "%s: k = %d hypotheses, %d clients a round, radius %s",
            type(self).__name__,
            self.hypotheses,
            self.clients_per_round,
            self.radius.mode,
        )

    def _ask(
        self,
        kind: str,
        clients: NDArray[np.int64],
        placed: dict[int, tuple[list[int], list[int]]],
        disclose: bool = False,
    ) -> dict[int, tuple[list[int], list[int]]]:
        positions = {node: np.array(positions) for node, (positions, _) in placed.items()}
        self._asked[kind] = _Asked(clients, positions, disclose)
        return placed

    def _answers(self, replies: Iterable[Message], asked: _Asked) -> dict[int, Message]:
        """Return one usable reply a node; errors, strangers and repeats are dropped."""
        answers: dict[int, Message] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                continue  # `exchange` knows whose
            if node in asked.positions and node not in answers:
                answers[node] = reply
            else:
                log(WARNING, "dropped an unasked reply of node %s", node)
        return answers

    def _collect(
        self, replies: Iterable[Message], asked: _Asked
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64] | None, int]:
        """Return releases (m, n) in client order, their positions in the sample, choices, lost nodes."""
        n = sum(value[0].size for value in self._current.values())
        matrices, positions, choices = [], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        answers = self._answers(replies, asked)
        lost = len(asked.positions) - len(answers)
        for node, reply in answers.items():
            try:
                matrix, released, chosen = self._read(reply, len(asked.positions[node]), asked.disclose)
            except Exception as error:  # whatever one node sends, the run goes on
                log(WARNING, "dropped the reply of node %s: %s", node, error)
                lost += 1
                continue
            matrices.append(matrix)
            positions.append(asked.positions[node][released])
            choices.append(chosen)
        joined = np.concatenate(positions)
        order = np.argsort(joined)
        disclosed = np.concatenate(choices)[order] if asked.disclose else None
        # One node has its clients in order, and models may be large.
        releases = matrices[0] if len(matrices) == 1 else np.concatenate([np.zeros((0, n)), *matrices])[order]
        return releases, joined[order], disclosed, lost

    def _read(
        self, reply: Message, asked: int, disclose: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
        """Check a train reply; return its releases (m, n), who released, and their choices."""
        counts = record_in(reply.content, COUNTS, MetricRecord)
        flags = np.asarray(counts["released"])
        if flags.shape != (asked,) or not ((flags == 0) | (flags == 1)).all():
            raise ValueError("it does not say who released")
        released = flags.astype(bool)
        arrays = from_array_record(record_in(reply.content, ARRAYS, ArrayRecord))
        m = int(released.sum())
        expected = {name: ((m, *value.shape[1:]), value.dtype) for name, value in self._current.items()}
        if {name: (value.shape, value.dtype) for name, value in arrays.items()} != expected:
            raise ValueError("its arrays do not fit the hypotheses")
        matrix = flatten({name: arrays[name] for name in self._current})
        if not all_finite(matrix):
            raise ValueError("its arrays are not finite")
        chosen = np.asarray(counts["choices"] if disclose else [])
        if disclose and (chosen.shape != (len(matrix),) or not np.isin(chosen, range(self.hypotheses)).all()):
            raise ValueError("it does not say what its clients chose")
        return matrix, released, chosen.astype(np.int64)


def _released(reply: Message) -> list[int]:
    """Return the flags of a train reply that says who released; nothing of one that says something else."""
    counts = reply.content.metric_records.get(COUNTS)
    flags = counts.get("released") if counts else None
    return [flag for flag in flags if flag in (0, 1)] if isinstance(flags, list) else []  # type: ignore[misc]
