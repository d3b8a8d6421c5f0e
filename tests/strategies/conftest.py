"""A federation on paper: its nodes say what a test has them say, so that results can be checked by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

from protocol.arrays import Arrays
from protocol.messages import CONFIG, COUNTS, Hosting, evaluate_reply, train_reply

SUPERLINK = 1  # the node id that Flower's own error replies come from

Said = Hosting | MetricRecord | Error | None


def vectors(arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return stacked arrays of the model on paper, weight (m, 1, 2) and bias (m, 1), as a matrix (m, 3)."""
    return np.concatenate([arrays["weight"][:, 0], arrays["bias"]], axis=1)


def stack(rows: Any) -> Arrays:
    """Return vectors (m, 3) as stacked arrays of the model on paper."""
    matrix = np.asarray(rows, np.float32).reshape(-1, 3)
    return {"weight": matrix[:, None, :2], "bias": matrix[:, 2:]}


class PaperGrid(Grid):
    """Nodes that exist on paper.

    Parameters
    ----------
    says : dict from node id to Hosting, MetricRecord, Error or None
        What each node replies to a query, None for nothing at all; a list is said one after the
        other, the last for ever.
    looks : sequence of lists of node ids, optional
        What Flower shows at each look for nodes, the last for ever; by default all at once.
    slow : dict from int to int, optional
        How many looks for its reply a node lets go by.

    Attributes
    ----------
    queried : list of int
        The nodes that were asked what they host, each time that they were.
    lifetimes : list of float
        How long each of these queries lives, in seconds.
    """

    def __init__(
        self,
        says: Mapping[int, Said | list[Said]],
        looks: Sequence[list[int]] = (),
        slow: Mapping[int, int] = {},
    ) -> None:
        self.says = {node: list(said) if isinstance(said, list) else [said] for node, said in says.items()}
        self.looks = list(looks) or [list(says)]
        self.slow = dict(slow)
        self.queried: list[int] = []
        self.lifetimes: list[float] = []
        self._replies: list[Message] = []
        self.in_process = True

    @classmethod
    def simulated(cls, train: int, validation: int = 0, nodes: int = 1, ids: Sequence[int] = ()) -> PaperGrid:
        """Return nodes that split a federation: node i hosts its clients i, i + nodes, ..."""
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
                if said.code == ErrorCode.NODE_UNAVAILABLE:  # what Flower says is not from the node
                    reply.metadata.__dict__["_src_node_id"] = SUPERLINK
                self._replies.append(reply)
            elif said is not None:
                record = said.to_record() if isinstance(said, Hosting) else said
                self._replies.append(Message(RecordDict({COUNTS: record}), reply_to=message))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        due, later = [], []
        for reply in self._replies:
            node = reply.metadata.src_node_id
            self.slow[node] = left = self.slow.get(node, 0) - 1
            (due if left < 0 else later).append(reply)
        self._replies = later
        return due

    # --- what a test needs to answer train and evaluate messages

    def asked(self, message: Message) -> list[int]:
        """Return the federation's numbers of the clients that a message asks, for simulated nodes."""
        hosting = self.says[message.metadata.dst_node_id][0]
        assert isinstance(hosting, Hosting)
        asked: Any = message.content.config_records[CONFIG]["clients"]
        return [hosting.first + hosting.step * local for local in asked]

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
            content = train_reply(
                stack([row for row in rows if row is not None]), [int(row is not None) for row in rows], choices
            )
            replies.append(Message(content, reply_to=message))
        return replies

    def scores(self, messages: Iterable[Message], loss_of: Callable[[int], float]) -> list[Message]:
        """Return replies in which the loss of each validation client is given and its metric is ten times that."""
        replies = []
        for message in messages:
            losses = np.array([loss_of(client) for client in self.asked(message)])
            replies.append(Message(evaluate_reply(losses, 10 * losses), reply_to=message))
        return replies

    # --- the rest of Flower's interface, which is not used here

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def error_reply(message: Message, source: int | None = None) -> Message:
    """Return an error in reply; Flower's own errors do not come from the node but from `SUPERLINK`."""
    reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "refused"), reply_to=message)
    if source is not None:
        reply.metadata.__dict__["_src_node_id"] = source
    return reply


@pytest.fixture(autouse=True)
def flower_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages be made, as in one of Flower's own processes."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture(scope="session")
def paper() -> Any:
    """What this file defines, since tests are no package to import from."""

    class Paper:
        Grid = PaperGrid
        stack = staticmethod(stack)
        vectors = staticmethod(vectors)
        error_reply = staticmethod(error_reply)
        superlink = SUPERLINK

    return Paper
