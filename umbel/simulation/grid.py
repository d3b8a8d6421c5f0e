"""A Flower Grid in this process, without Ray or a SuperLink."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from umbel.protocol.flower import ErrorCode, Run, delivered, identify, number
from umbel.protocol.simulated import in_process

_SERVER = 1
_FIRST_NODE = 100


class InProcessGrid(Grid):
    """Nodes in this process that answer in turn, as soon as messages are pushed.

    Messages and replies arrive as over a network: whoever changes one, changes no other.

    Parameters
    ----------
    client_app : ClientApp
        The app of every node.
    run_config : mapping
        The run's configuration, as in ``[tool.flwr.app.config]``.
    nodes : int
        Number of simulated nodes, which split the run config's dataset.
    node_configs : sequence of mapping, optional
        Instead of `nodes`: the configuration of each node, as at a site.

    Attributes
    ----------
    contexts : dict from int to Context
        The configuration and state of each node, by node id.
    """

    in_process = True
    """Nodes are as trusted as the server, and pulling never waits."""

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
        self._ids = count()
        self._replies: dict[str, Message] = {}
        self.contexts = {
            node: Context(1, node, dict(config), RecordDict(), dict(run_config))
            for node, config in enumerate(node_configs, _FIRST_NODE)
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
        """Pass each message to its node, which answers; return the messages' ids."""
        ids = []
        for message in messages:
            ids.append(self.numbered(message))
            self._replies[ids[-1]] = self._answer(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to the given messages, each once."""
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return their replies; every node has already answered, so there is no waiting."""
        return self.pull_messages(list(self.push_messages(messages)))

    def _answer(self, message: Message) -> Message:
        """Return a node's reply, or, if its app raises, an error like that of Flower's own engine."""
        try:
            with in_process():
                reply = self._app(delivered(message), self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            reason = f"{type(error)}:<'{error}'>"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        self.numbered(reply)
        return delivered(reply)

    def numbered(self, message: Message) -> str:
        """Give a message a new id, and return it."""
        number(message, str(next(self._ids)))
        return message.metadata.message_id
