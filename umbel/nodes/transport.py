"""Transports, which carry messages to nodes and replies back: a simulation in this process, or a SuperLink."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import chain, count
from logging import WARNING
from threading import Thread
from typing import ClassVar, NamedTuple

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from umbel.privacy.channels import load
from umbel.protocol.flower import drop_limit, in_memory, limit_answer, refuse_repeated_parts
from umbel.protocol.log import log
from umbel.protocol.messages import channel_asked, numbers_asked
from umbel.protocol.release import CHANNELS
from umbel.protocol.words import as_line

# Messages sent at a time: nodes then find all parts of theirs at once, and need not ask repeatedly.
_BATCH = 16
# Parallel pulls: of replies of this round, of useful late replies, and of useless late replies.
_PULLS = (16, 2, 2)
# A pull is stuck when it takes this many times as long as usual, but at least and at most this many seconds.
_STUCK, _SHORTEST, _LONGEST = 4, 1.0, 10.0
# A pull of a reply costs about this many requests. A pull that finds no reply costs one.
_REQUESTS = 10
# A reply is given up after this many pulls at which the SuperLink failed.
_TRIES = 5
# Bytes of an answer without its models: Flower's description of records, arrays or an error; and for each client
# whether it released, its choice, its loss and its metric.
_OF_FLOWER, _OF_A_CLIENT = 1 << 16, 32
# Errors of the connection to the SuperLink; they are not a node's fault.
_UNREACHABLE = (httpx.HTTPError, OSError)


class Transport:
    """Carries messages over one of Flower's grids."""

    together: ClassVar[bool]
    """Whether all nodes belong to the server's own simulation, and are as trusted as the server."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> dict[int, str]:
        """Return the connected nodes, each with the name of its registration; empty without one."""
        return dict.fromkeys(self.grid.get_node_ids(), "")

    def send(self, messages: Sequence[Message]) -> set[str]:
        """Send messages, and return the ids of those that were sent."""
        batches = [messages[start : start + _BATCH] for start in range(0, len(messages), _BATCH)]
        return {message_id for batch in batches for message_id in self.grid.push_messages(batch)}

    def collect(self, ids: Sequence[Collection[str]], seconds: float) -> tuple[list[Message], list[str]]:
        """Return available replies, and the ids of messages whose replies cannot be read.

        Parameters
        ----------
        ids : sequence of three collections of str
            Ids of this round's messages, of earlier ones whose late replies are useful, and of others.
        seconds : float
            Seconds to wait for replies on their way; a later call returns later ones.
        """
        raise NotImplementedError


def transport_of(grid: Grid) -> Transport:
    """Return the transport of a grid: of umbel's own simulations, of Flower's, or of a SuperLink."""
    return (Simulation if getattr(grid, "in_process", False) or in_memory(grid) else SuperLink)(grid)


class Simulation(Transport):
    """Nodes that the server's own simulation hosts: pulling never waits, and all replies can be read."""

    together = True

    def collect(self, ids: Sequence[Collection[str]], seconds: float) -> tuple[list[Message], list[str]]:
        """Return replies that are there."""
        return list(self.grid.pull_messages([*chain(*ids)])), []


def largest_answer(content: RecordDict) -> int:
    """Return how many bytes the answer to a message may have: all its parts together, as Flower sends them."""
    asked = numbers_asked(content)
    size = _OF_FLOWER + _OF_A_CLIENT * sum(asked)
    if (found := channel_asked(content)) is not None:
        name, matrix, (k, *columns) = found
        models = load(name).rows(k, asked[0])
        # The name is JSON within JSON, and Flower names each 5 MiB of the array.
        size += 2 * len(matrix) + math.ceil(4 * models * math.prod(columns) * (1 + 2**-10))
    for name, record in content.items():
        if name in CHANNELS and isinstance(record, ConfigRecord):
            size += load(name).room(record)
    return size


class _Pull(NamedTuple):
    """A pull in progress: its kind among `_PULLS`, its message, and its start."""

    kind: int
    message_id: str
    began: float


class SuperLink(Transport):
    """Nodes behind a SuperLink.

    Each reply is pulled separately, in a thread. Flower's pull waits for minutes if a node cuts off the upload of its
    reply, and raises if a reply cannot be read; neither delays other replies. The number of parallel pulls is bounded,
    and a stuck pull no longer counts. Only a pull that finds a reply is followed by another: while nodes compute, a
    call does not ask for all replies, and the next call continues where it ended.
    """

    together = False

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        refuse_repeated_parts()
        self.usual = 0.0
        """Seconds that a reply takes."""
        self._pulls: dict[Future[list[Message]], _Pull] = {}
        self._count = count(1)
        self._last: dict[str, int] = {}  # the number of the last pull for each message
        self._failures: Counter[str] = Counter()
        self._read: tuple[list[Message], list[str]] = [], []  # what `collect` returns next

    def nodes(self) -> dict[int, str]:
        """Return the connected nodes, each with the name that the operator registered it with; empty without one."""
        if (infos := getattr(self.grid, "get_nodes", None)) is None:
            return super().nodes()
        return {one.node_id: one.name for one in infos()}

    def send(self, messages: Sequence[Message]) -> set[str]:
        """Send messages, each with a note of its answer's maximum size."""
        for message in messages:
            limit_answer(message, largest_answer(message.content))
        return super().send(messages)

    def collect(self, ids: Sequence[Collection[str]], seconds: float) -> tuple[list[Message], list[str]]:
        """Return available replies; raise errors of the connection to the SuperLink."""
        now, longest = time.monotonic(), min(max(_SHORTEST, _STUCK * self.usual), _LONGEST)
        busy = Counter(pull.kind for pull in self._pulls.values() if now - pull.began < longest)
        free = [most - busy[kind] for kind, most in enumerate(_PULLS)]
        self._last = {one: self._last.get(one, 0) for one in chain(*ids)}
        pulled = {pull.message_id for pull in self._pulls.values()}
        queues = [deque(sorted((one for one in some if one not in pulled), key=self._last.__getitem__)) for some in ids]
        mine: set[Future[list[Message]]] = set()
        while True:
            for kind, queue in enumerate(queues):
                while queue and free[kind] > 0:
                    free[kind] -= 1
                    mine.add(self._begin(kind, queue.popleft()))
            # Pulls of earlier calls are not waited for.
            done, _ = wait(self._pulls, max(0.0, now + seconds - time.monotonic()) if mine else 0.0, FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                pull = self._pulls.pop(future)
                followed = self._keep(pull, future)
                free[pull.kind] += followed and future in mine
            mine -= done
        read, self._read = self._read, ([], [])
        return read

    def _begin(self, kind: int, message_id: str) -> Future[list[Message]]:
        """Pull the reply to a message in a thread that does not delay the end of the process."""
        future: Future[list[Message]] = Future()

        def pull() -> None:
            began = time.monotonic()
            try:
                replies = list(self.grid.pull_messages([message_id]))
            except Exception as error:  # judged by `_keep`
                future.set_exception(error)
                return
            self.learn((time.monotonic() - began) * (1 if replies else _REQUESTS))
            future.set_result(replies)

        self._pulls[future] = _Pull(kind, message_id, time.monotonic())
        self._last[message_id] = next(self._count)
        Thread(target=pull, daemon=True).start()
        return future

    def learn(self, seconds: float) -> None:
        """Note how long a reply took. A far slower one counts little: a node may want others to seem slow."""
        self.usual += (min(seconds, 2 * self.usual + _SHORTEST / 10) - self.usual) / 8

    def _keep(self, pull: _Pull, future: Future[list[Message]]) -> bool:
        """Keep the result of a pull; return whether another pull follows."""
        error, (replies, unreadable) = future.exception(), self._read
        if isinstance(error, httpx.HTTPStatusError) and error.response.is_server_error:
            # The SuperLink failed: it was too slow, or fails repeatedly at this reply.
            self._failures[pull.message_id] += 1
            if self._failures[pull.message_id] < _TRIES:
                return True
        elif isinstance(error, _UNREACHABLE):
            raise error
        self._failures.pop(pull.message_id, None)
        if error is not None:
            log(WARNING, "a reply cannot be read: %s", as_line(error))
            unreadable.append(pull.message_id)
            return True
        found = future.result()
        for reply in found:
            drop_limit(reply)
        if any(reply.metadata.reply_to_message_id != pull.message_id for reply in found):
            # It would be taken for the reply of the node whose message it names.
            log(WARNING, "dropped a reply to another message than the one asked about")
            unreadable.append(pull.message_id)
        else:
            replies += found
        return bool(found)
