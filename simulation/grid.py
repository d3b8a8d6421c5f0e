"""A Flower Grid in one process: the same strategy and ClientApp, without Ray or a SuperLink."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from privacy.site import in_process
from protocol.flower import ErrorCode, Run, identify

_SERVER = 1
_FIRST_NODE = 100


class InProcessGrid(Grid):
    """Nodes that live in this process and answer one after the other.

    Parameters
    ----------
    client_app : ClientApp
        The app of every node.
    run_config : mapping
        The run's configuration, as in ``[tool.flwr.app.config]``.
    nodes : int
        Number of simulated nodes, which split the run config's federation.
    node_configs : sequence of mapping, optional
        Instead of `nodes`: the configuration of each node, as a site would write it.

    Attributes
    ----------
    contexts : dict from int to Context
        What each node keeps, by node id.
    """

    in_process = True
    """Replies are there as soon as messages are pushed, and pulling never waits."""

    def __init__(
        self,
        client_app: ClientApp,
        run_config: Mapping[str, Any],
        nodes: int = 1,
        node_configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if node_configs is None:
            node_configs = [{"partition-id": i, "num-partitions": nodes} for i in range(nodes)]
        self._app = client_app
        self._run = Run.create_empty(run_id=1)
        self._replies: dict[str, Message] = {}
        self._ids = count()
        self.contexts = {
            _FIRST_NODE + i: Context(1, _FIRST_NODE + i, dict(config), RecordDict(), dict(run_config))
            for i, config in enumerate(node_configs)
        }
        identify(_SERVER)

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a new message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have each message answered by its node; return the messages' ids."""
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(next(self._ids))
            self._replies[message.metadata.message_id] = self._answer(message)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to the given messages, each once."""
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return their replies; every node answers, so there is no waiting."""
        return self.pull_messages(list(self.push_messages(messages)))

    def _answer(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        try:
            with in_process():
                reply = self._app(message, context)
        except Exception as error:  # as Flower's own engines do
            reply = Message(
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>"), reply_to=message
            )
        reply.metadata.__dict__["_message_id"] = str(next(self._ids))
        return reply
