"""Grids between a strategy and its nodes: one on paper, and the in-process one with an ear on what travels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

import umbel.client.app
from tests.helpers.replies import evaluation_reply, training_reply
from umbel.protocol.arrays import Arrays
from umbel.protocol.flower import ErrorCode
from umbel.protocol.messages import evaluation_in, hosting_reply, numbers_asked, training_in
from umbel.protocol.tasks import Hosting
from umbel.simulation.grid import InProcessGrid

SUPERLINK = 1  # the node id that Flower's own error replies come from

Said = Hosting | MetricRecord | Error | None


# --- on paper: nodes say what a test has them say, so that results can be checked by hand


def vectors(arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return stacked arrays of the model on paper, weight (m, 1, 2) and bias (m, 1), as a matrix (m, 3)."""
    return np.concatenate([arrays["weight"][:, 0], arrays["bias"]], axis=1)


def stack(rows: Any) -> Arrays:
    """Return vectors (m, 3) as stacked arrays of the model on paper."""
    matrix = np.asarray(rows, np.float32).reshape(-1, 3)
    return {"weight": matrix[:, None, :2], "bias": matrix[:, 2:]}


class PaperGrid(InProcessGrid):
    """Nodes that exist on paper.

    A node replies to a query as it `says`, with nothing at all for None; a list is said one after the other, the last
    for ever. Flower shows the nodes of each of the `looks`, the last for ever. A `slow` node lets so many looks for its
    reply go by. `queried` has the nodes that were asked what they host, `lifetimes` the seconds that each query lives.
    """

    flowers: Collection[int] = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE)

    def __init__(
        self, says: Mapping[int, Said | list[Said]], looks: Sequence[list[int]] = (), slow: Mapping[int, int] = {}
    ) -> None:
        super().__init__(umbel.client.app.app, {}, node_configs=[{}])
        self.says = {node: list(said) if isinstance(said, list) else [said] for node, said in says.items()}
        self.looks = list(looks) or [list(says)]
        self.slow = dict(slow)
        self.queried: list[int] = []
        self.lifetimes: list[float] = []
        self.waiting: list[Message] = []

    @classmethod
    def simulated(cls, train: int, validation: int = 0, nodes: int = 1, ids: Sequence[int] = ()) -> PaperGrid:
        """Return nodes that split a dataset: node i hosts its clients i, i + nodes, ..."""
        says = {}
        for i, node in enumerate(ids or range(100, 100 + nodes)):
            clients = range(i, train + validation, nodes)
            mine = sum(client < train for client in clients)
            says[node] = Hosting(mine, len(clients) - mine, i, nodes)
        return cls(says)

    def get_node_ids(self) -> Iterable[int]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(len(self.queried))
            ids.append(message.metadata.message_id)
            assert message.metadata.message_type == "query"
            node = message.metadata.dst_node_id
            self.queried.append(node)
            self.lifetimes.append(message.metadata.ttl)
            said = self.says[node].pop(0) if len(self.says[node]) > 1 else self.says[node][0]
            if isinstance(said, Error):
                reply = Message(said, reply_to=message)
                if said.code in self.flowers:  # what Flower says is not from the node
                    reply.metadata.__dict__["_src_node_id"] = SUPERLINK
                self.waiting.append(reply)
            elif said is not None:
                content = hosting_reply(said) if isinstance(said, Hosting) else RecordDict({"hosting": said})
                self.waiting.append(Message(content, reply_to=message))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        due, later, asked = list[Message](), list[Message](), set(message_ids)
        for reply in self.waiting:
            if reply.metadata.reply_to_message_id not in asked:
                later.append(reply)
                continue
            node = reply.metadata.src_node_id
            self.slow[node] = left = self.slow.get(node, 0) - 1
            (due if left < 0 else later).append(reply)
        self.waiting = later
        return due

    # --- what a test needs to answer a round's messages

    def asked(self, message: Message) -> list[int]:
        """Return the dataset's numbers of the clients that a message asks, for simulated nodes."""
        hosting = self.says[message.metadata.dst_node_id][0]
        assert isinstance(hosting, Hosting)
        task = training_in(message.content) or evaluation_in(message.content)
        assert task is not None
        return [hosting.first + hosting.step * local for local in task.clients]

    def releases(
        self,
        messages: Iterable[Message],
        release_of: Callable[[int], Sequence[float] | None],
        choice_of: Callable[[int], int] | None = None,
    ) -> list[Message]:
        """Return replies in which each client releases a vector, or nothing where it is None."""
        replies = []
        for message in messages:
            clients = self.asked(message)
            rows = [release_of(client) for client in clients]
            out = [client for client, row in zip(clients, rows, strict=True) if row is not None]
            choices = [choice_of(client) for client in out] if choice_of else None
            content = training_reply(
                stack([row for row in rows if row is not None]), [int(row is not None) for row in rows], choices
            )
            replies.append(Message(content, reply_to=message))
        return replies

    def scores(self, messages: Iterable[Message], loss_of: Callable[[int], float]) -> list[Message]:
        """Return replies in which the loss of each validation client is given and its metric is ten times that."""
        replies = []
        for message in messages:
            losses = np.array([loss_of(client) for client in self.asked(message)])
            replies.append(Message(evaluation_reply(losses, 10 * losses), reply_to=message))
        return replies


def error_reply(message: Message, source: int | None = None) -> Message:
    """Return an error in reply; Flower's own errors do not come from the node but from `SUPERLINK`."""
    reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "refused"), reply_to=message)
    if source is not None:
        reply.metadata.__dict__["_src_node_id"] = source
    return reply


# --- in process: the nodes are real


class ListeningGrid(InProcessGrid):
    """The in-process grid; remembers the messages that were sent, and the reply to each at the same place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent: list[Message] = []
        self.replies: list[Message] = []

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        self.sent.append(message)
        kept = copy(reply)
        if reply.has_content():  # which the server lets go of once it has read it
            kept.content = RecordDict(dict(reply.content.items()))
        self.replies.append(kept)
        return reply

    @property
    def rounds(self) -> dict[str, Counter[int]]:
        """How many messages each node got in each round, by the messages' group."""
        counted: dict[str, Counter[int]] = {}
        for message in self.sent:
            metadata = message.metadata
            if not metadata.message_type.startswith("query"):
                counted.setdefault(metadata.group_id, Counter())[metadata.dst_node_id] += 1
        return counted

    def exchanged(self, group: str) -> list[tuple[Message, Message]]:
        """Return the messages of a round, each with its reply."""
        pairs = zip(self.sent, self.replies, strict=True)
        return [(message, reply) for message, reply in pairs if message.metadata.group_id == group]


App = Callable[[Message, Context], Message]


def failing(partitions: Collection[int], parts: Collection[str] = ("training", "evaluation"), app: Any = None) -> App:
    """Return umbel's ClientApp, or another, of which the nodes of some partitions fail in some parts of a message.

    A part is ``training``, ``evaluation``, or a type of message, as ``query``; other parts are answered.
    """
    whole = app or umbel.client.app.app

    def fails(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] in partitions:
            left = RecordDict({name: record for name, record in message.content.items() if name not in parts})
            nothing = any(numbers_asked(message.content)) and not any(numbers_asked(left))
            if nothing or message.metadata.message_type in parts:
                raise RuntimeError("the power went")
            message = copy(message)
            message.content = left
        return whole(message, context)

    return fails
