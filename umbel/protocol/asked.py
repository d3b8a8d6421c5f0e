"""A round's clients, and the replies of their nodes, one of each. Invalid replies are dropped; the round continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, TypeVar

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.log import log
from umbel.protocol.words import as_line

T = TypeVar("T")


class Names(dict[int, str]):
    """Each node's name in the log: a site has that of its registration, another node its number."""

    def __missing__(self, node: int) -> str:
        return f"node {node}"

    def learn(self, registered: Mapping[int, str]) -> None:
        """Take over the names of registered nodes; those without a name are empty."""
        self.update((node, f"site {as_line(name)}") for node, name in registered.items() if name)


@dataclass
class Asked:
    """The clients that a round asks to train, or to evaluate, and the messages that do so.

    Attributes
    ----------
    hypotheses : Hypotheses
        Those that the clients get.
    clients : ndarray of int
        Their numbers in the run (`umbel.protocol.clients.ClientInRun`), in increasing order.
    positions : dict from node id to ndarray of int
        Where the clients of each node that is asked stand among `clients`.
    messages : list of Message
    task : TrainingSpec or EvaluationSpec, optional
        The task of all of them, without round and clients; nodes of another Flower app have none.
    names : Names
        The nodes' names in the log.
    """

    hypotheses: Hypotheses
    clients: NDArray[np.int64]
    positions: dict[int, NDArray[np.int64]]
    messages: list[Message] = field(default_factory=list)
    task: Any = None
    names: Names = field(default_factory=Names)


def read_replies(asked: Asked, replies: Iterable[Message], content: Callable[[int, Message], T | None]) -> dict[int, T]:
    """Return the content of the first reply of each node that was asked.

    Errors are not read here; `umbel.nodes.exchange` logs them.

    Parameters
    ----------
    content : callable
        Checks a reply, given the node, and returns its content; any error drops the reply. It may return None for a
        reply that has no such part.
    """
    heard: set[int] = set()
    contents: dict[int, T] = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error() or node not in asked.positions or node in heard:
            continue
        heard.add(node)
        try:
            part = content(node, reply)
        except Exception as error:  # keep running: one bad node must not stop the round
            log(WARNING, "dropped the reply of %s: %s", asked.names[node], as_line(error))
            continue
        if part is not None:
            contents[node] = part
    return contents
