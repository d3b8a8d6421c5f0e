"""The nodes of any Flower app: each is one client, trains one model, and answers in Flower's usual records."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from logging import INFO, WARNING
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from umbel.protocol.arrays import Arrays, all_finite, flatten
from umbel.protocol.asked import Asked, read_replies
from umbel.protocol.errors import ConfigError, ProtocolError
from umbel.protocol.hypotheses import NUMBER, ROUND, Hypotheses
from umbel.protocol.log import log
from umbel.protocol.releases import Releases
from umbel.protocol.words import as_line

_KINDS = {MessageType.TRAIN: 1, MessageType.EVALUATE: 2}  # separates the draws of those asked to train and to evaluate
_LOOK_S = 1.0  # between two looks for nodes

Aggregate = Callable[[list[RecordDict], str], MetricRecord]
"""Flower's type of a function that aggregates the metrics of replies; its second argument is "num-examples"."""
_WEIGHT = "num-examples"

T = TypeVar("T")


def mean_metrics(contents: list[RecordDict], _: str) -> MetricRecord:
    """Return the mean of each metric over the replies that have it, unweighted."""
    values: dict[str, list[float]] = {}
    for content in contents:
        for record in content.metric_records.values():
            for name, value in record.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    values.setdefault(name, []).append(float(value))
    return MetricRecord({name: float(np.mean(some)) for name, some in values.items()})


def _kind(message: Message) -> str:
    """Return what a message asks for, also of a named handler, as in ``train.mine``."""
    return message.metadata.message_type.partition(".")[0]


@dataclass
class PlainNodes:
    """The nodes of a grid, each of which is one client. The parameters are those of Flower's `FedAvg`.

    Parameters
    ----------
    fraction_train, fraction_evaluate : float
        Share of the connected nodes that a round asks; 0 for none.
    min_train_nodes, min_evaluate_nodes, min_available_nodes : int
        A round asks, and waits for, at least so many.
    seed : int
        Of the samples. Node ids differ from run to run, so the same seed asks other nodes.
    """

    fraction_train: float = 1.0
    fraction_evaluate: float = 0.0
    min_train_nodes: int = 1
    min_evaluate_nodes: int = 1
    min_available_nodes: int = 1
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    train_metrics_aggr_fn: Aggregate = mean_metrics
    evaluate_metrics_aggr_fn: Aggregate = mean_metrics
    seed: int = 0
    participations: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), init=False)
    """Number of releases of each node, in the order in which they were first asked."""
    _numbers: dict[int, int] = field(default_factory=dict, init=False)

    used_up = unanswered = False

    def __post_init__(self) -> None:
        if not (0 <= self.fraction_train <= 1 and 0 <= self.fraction_evaluate <= 1):
            raise ConfigError("fractions of nodes lie between 0 and 1", code="config.fraction")
        if min(self.min_train_nodes, self.min_evaluate_nodes, self.min_available_nodes) < 1:
            raise ConfigError("minima of nodes are at least 1", code="config.fraction")

    # --- asking

    def read_hypotheses(self, arrays: ArrayRecord) -> Hypotheses:
        """Return the hypotheses of a record."""
        hypotheses = Hypotheses({name: array.numpy() for name, array in arrays.items()})
        hypotheses.record = arrays
        return hypotheses

    def record(self, hypotheses: Arrays) -> ArrayRecord:
        """Return hypotheses as the record from which a round's messages are made."""
        return ArrayRecord({name: Array(value) for name, value in hypotheses.items()})

    def _ask(
        self,
        kind: str,
        round: int,
        hypotheses: Hypotheses,
        config: ConfigRecord,
        grid: Grid,
        decisions: Mapping[str, Any],
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Asked:
        """Ask a sample of the nodes.

        Raises
        ------
        ConfigError
            If the strategy decides something that only umbel's clients know.
        """
        if unknown := sorted({**decisions, **options}):
            text = f"the strategy needs clients that know {', '.join(unknown)}, which are those of umbel's app"
            raise ConfigError(f"{text}; run it with umbel run, or take another strategy", code="config.plain-nodes")
        train, nobody = kind == MessageType.TRAIN, Asked(hypotheses, np.zeros(0, np.int64), {})
        fraction = self.fraction_train if train else self.fraction_evaluate
        least = self.min_train_nodes if train else self.min_evaluate_nodes
        if not fraction:
            return nobody
        nodes = self._connected(grid, max(least, self.min_available_nodes))
        size = max(int(fraction * len(nodes)), least)
        sample = np.random.default_rng([self.seed, _KINDS[kind], round]).choice(len(nodes), size, replace=False)
        chosen = [nodes[i] for i in np.sort(sample).tolist()]
        log(INFO, "round %d: %s %d of %d nodes", round, kind, size, len(nodes))
        if NUMBER in config:
            text = f"the config that nodes get has an entry {NUMBER!r} of umbel's: the number of hypotheses"
            raise ConfigError(f"{text}; give yours another name", code="config.plain-nodes")
        entries = ConfigRecord({**config, ROUND: round, NUMBER: hypotheses.k})
        content = RecordDict({self.arrayrecord_key: hypotheses.record, self.configrecord_key: entries})
        return self.asked([Message(content, node, kind, group_id=str(round)) for node in chosen], nobody)

    ask_training = partialmethod(_ask, MessageType.TRAIN)
    ask_evaluation = partialmethod(_ask, MessageType.EVALUATE)

    def asked(self, messages: Sequence[Message], asked: Asked) -> Asked:
        """Return who is asked by messages, which a strategy may have made by itself."""
        nodes = {message.metadata.dst_node_id for message in messages}
        for node in sorted(nodes):
            self._number(node)
        clients = np.array(sorted(self._numbers[node] for node in nodes), np.int64)
        positions = {node: clients.searchsorted([self._numbers[node]]) for node in nodes}
        return Asked(asked.hypotheses, clients, positions, list(messages))

    def _connected(self, grid: Grid, least: int) -> list[int]:
        """Return the connected nodes, once there are enough."""
        while len(nodes := sorted(grid.get_node_ids())) < least:
            log(INFO, "waiting for nodes: %d of at least %d are connected", len(nodes), least)
            time.sleep(_LOOK_S)
        for node in nodes:
            self._number(node)
        return nodes

    def _number(self, node: int) -> None:
        """Give a node its number, if it has none."""
        if node not in self._numbers:
            self._numbers[node] = len(self._numbers)
            self.participations = np.append(self.participations, 0)

    def wait(self, *_: Any) -> None:
        """Do nothing: a run of plain nodes has no pauses."""

    def exchange(
        self, round: int, grid: Grid, messages: Sequence[Message], timeout: float
    ) -> tuple[list[Message], list[Message]]:
        """Send messages; return the replies to those that ask to train, and to those that ask to evaluate."""
        replies = list(grid.send_and_receive(messages, timeout=timeout))
        for reply in replies:
            if reply.has_error():
                log(WARNING, "node %d did not reply: %s", reply.metadata.src_node_id, as_line(reply.error.reason))
        kinds = {message.metadata.message_id: _kind(message) for message in messages}
        by_kind = {
            kind: [one for one in replies if kinds.get(one.metadata.reply_to_message_id) == kind] for kind in _KINDS
        }
        return by_kind[MessageType.TRAIN], by_kind[MessageType.EVALUATE]

    # --- reading

    def read(self, asked: Asked, replies: Iterable[Message]) -> Releases:
        """Return the models in the replies to `ask_training`; each node counts as one client."""
        sent = asked.hypotheses
        found = self._read(asked, replies, lambda _, reply: (_vector(reply.content, sent), reply.content))
        clients = np.array([self._numbers[node] for node in found], np.int64)
        self.participations[clients] += 1
        matrix = np.concatenate([sent.matrix[:0], *(vector for vector, _ in found.values())])
        matrix.flags.writeable = False
        contents = [content for _, content in found.values()]
        metrics = self.train_metrics_aggr_fn(contents, _WEIGHT) if contents else {}
        return Releases(matrix, clients, None, len(asked.clients), len(asked.clients) - len(found), metrics=metrics)

    def evaluation(self, asked: Asked, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the metrics in the replies to `ask_evaluation`, aggregated; None without replies."""
        contents = list(self._read(asked, replies, lambda _, reply: reply.content).values())
        return self.evaluate_metrics_aggr_fn(contents, _WEIGHT) if contents else None

    def _read(self, asked: Asked, replies: Iterable[Message], content: Callable[[int, Message], T]) -> dict[int, T]:
        """Return the contents of the nodes' replies, in the order of the nodes' numbers."""
        found = read_replies(asked, replies, content)
        return dict(sorted(found.items(), key=lambda one: self._numbers[one[0]]))


def _vector(content: RecordDict, sent: Hypotheses) -> NDArray[Any]:
    """Return the one model of a reply as a matrix (1, n)."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise ProtocolError(f"it has {len(records)} records of arrays, not 1", code="protocol.records")
    shapes = {name: value.shape[1:] for name, value in sent.items()}
    arrays = {name: array.numpy() for name, array in records[0].items()}
    if sent.k == 1:  # a wrapper's arithmetic with the one hypothesis gives it an axis
        arrays = {
            name: value[0] if value.shape == (1, *shapes.get(name, ())) else value for name, value in arrays.items()
        }
    if {name: value.shape for name, value in arrays.items()} != shapes:
        raise ProtocolError("its arrays are not those of one model", code="protocol.arrays")
    with np.errstate(over="ignore", invalid="ignore"):  # what does not fit the model's own type is not finite there
        like = {name: arrays[name].astype(sent[name].dtype)[None] for name in shapes}
    if not all(map(all_finite, (*arrays.values(), *like.values()))):
        raise ProtocolError("its arrays are not finite", code="protocol.not-finite")
    vector: NDArray[Any] = flatten(like, sent.matrix.dtype)
    return vector
