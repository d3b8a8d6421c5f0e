"""Messages and their replies: until enough is there, or time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import WARNING
from queue import Empty, SimpleQueue
from threading import Thread

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from fleet.words import told
from protocol.flower import ErrorCode, log
from protocol.polling import pause

# Messages without a reply, of rounds that are over.
_REMEMBERED = 1000
# Pulls that a look begins at a time, and the seconds that it waits for them.
_LANES, _PATIENCE = 16, 1.0
# Messages sent at a time: those who look for theirs find its parts there, and need not ask for them again and again.
_BATCH = 16
# What goes wrong on the way to the SuperLink is no fault of the node whose reply was pulled.
_TRANSPORT = (httpx.HTTPError, OSError)
# What a client app raises is an answer; these are Flower's own words.
_GONE = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)


@dataclass(frozen=True)
class Answer:
    """A reply, with the node and the type of the message it is for.

    Error replies that the SuperLink makes for a node that is gone name the SuperLink as their
    sender, so that a node is known by the message that was sent to it alone.

    Attributes
    ----------
    node : int
    kind : str
    reply : Message
    """

    node: int
    kind: str
    reply: Message

    @property
    def gone(self) -> bool:
        """Whether the node is gone, or did not come to answer."""
        return self.reply.has_error() and self.reply.error.code in _GONE


@dataclass(frozen=True)
class _Sent:
    """What must be remembered of a message; its content may be large."""

    node: int
    kind: str


class _Mailbox:
    """Pulls each reply by itself, in threads.

    A node that cuts off the upload of its reply makes Flower's pull wait for the rest, minutes
    long, and one whose reply Flower cannot read makes it raise. Neither shall hold up a round, or
    take the replies of others along.
    """

    def __init__(self) -> None:
        self._pulling: set[str] = set()
        self._next: SimpleQueue[str] = SimpleQueue()
        self._done: SimpleQueue[tuple[str, list[Message] | Exception]] = SimpleQueue()

    def pull(self, grid: Grid, message_ids: Sequence[str], patience: float) -> tuple[list[Message], list[str]]:
        """Return the replies that are there, and the messages whose replies cannot be read.

        A pull that takes longer than `patience` seconds goes on, and its reply is among the next.
        """
        if getattr(grid, "in_process", False):
            return list(grid.pull_messages(message_ids)), []
        begun = {message_id for message_id in message_ids if message_id not in self._pulling}
        self._pulling.update(begun)
        for message_id in begun:
            self._next.put(message_id)
        # Threads of earlier looks may be stuck: these do not wait for them, and take what those have left.
        for _ in range(min(_LANES, self._next.qsize())):
            Thread(target=self._pull, args=(grid,), daemon=True).start()
        until = time.monotonic() + patience
        replies: list[tuple[str, list[Message]]] = []
        unreadable: list[str] = []
        lost: Exception | None = None
        while True:
            try:
                message_id, pulled = self._done.get(timeout=max(0.0, until - time.monotonic()) if begun else 0.0)
            except Empty:
                break
            begun.discard(message_id)
            self._pulling.discard(message_id)
            if isinstance(pulled, list):
                replies.append((message_id, pulled))
            elif isinstance(pulled, _TRANSPORT):
                lost = pulled
            else:
                log(WARNING, "a reply cannot be read: %s", told(pulled))
                unreadable.append(message_id)
        if lost is not None:
            for read in replies:  # nobody can pull them again
                self._done.put(read)
            raise lost
        return [reply for _, pulled in replies for reply in pulled], unreadable

    def _pull(self, grid: Grid) -> None:
        """Pull one reply after the other until there are no more to pull."""
        while True:
            try:
                message_id = self._next.get_nowait()
            except Empty:
                return
            try:
                self._done.put((message_id, list(grid.pull_messages([message_id]))))
            except Exception as error:  # judged where it is waited for
                self._done.put((message_id, error))


class Exchange:
    """Sends messages and collects their replies, round after round.

    Attributes
    ----------
    dropped : int
        Replies of the last round that were of no use: late, doubled, or from a node that was not
        asked.
    silent : set of int
        Nodes that owe a reply of the last round, or sent one that cannot be read.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self.silent: set[int] = set()
        self._overdue: dict[str, _Sent] = {}
        self._mailbox = _Mailbox()

    def awaited(self, kind: str) -> set[int]:
        """Return the nodes that still owe a reply to a message of a type, of whatever round."""
        return {sent.node for sent in self._overdue.values() if sent.kind == kind}

    def run(
        self,
        grid: Grid,
        messages: Sequence[Message],
        timeout: float,
        enough: Callable[[Sequence[Answer]], bool] = lambda _: False,
        keep_late: Sequence[str] = (),
    ) -> list[Answer]:
        """Send messages and return what was answered.

        Parameters
        ----------
        grid : Grid
        messages : sequence of Message
        timeout : float
            Seconds after which no more replies are waited for.
        enough : callable
            Whether the answers so far will do, so that the others need not be waited for.
        keep_late : sequence of str
            Types of message whose replies are of use however late they come; nobody waits for
            them.

        Returns
        -------
        list of Answer
            One a message at most, in no order.
        """
        self.dropped = 0
        for message in messages:
            if message.metadata.message_type not in keep_late:
                # A node that would pick it up when the round is over would train, and pay, for nothing.
                message.metadata.ttl = min(message.metadata.ttl, timeout)
        batches = [list(messages[i : i + _BATCH]) for i in range(0, len(messages), _BATCH)]
        stored = {message_id for batch in batches for message_id in grid.push_messages(batch)}
        data = [message.metadata for message in messages]
        waiting = {one.message_id: _Sent(one.dst_node_id, one.message_type) for one in data if one.message_id in stored}
        if len(waiting) < len(messages):
            log(WARNING, "%d of %d messages could not be sent", len(messages) - len(waiting), len(messages))
        began = time.monotonic()
        answers: list[Answer] = []
        spoilt: list[_Sent] = []
        while True:
            left = max(0.0, began + timeout - time.monotonic())
            replies, unreadable = self._mailbox.pull(grid, [*waiting, *self._overdue], min(_PATIENCE, left))
            for message_id in unreadable:
                self._overdue.pop(message_id, None)
                if message_id in waiting:
                    spoilt.append(waiting.pop(message_id))
            for reply in replies:
                answer = self._match(reply, waiting, keep_late)
                if answer is not None:
                    answers.append(answer)
            needed = [sent for sent in waiting.values() if sent.kind not in keep_late]
            waited = time.monotonic() - began
            if not needed or waited >= timeout or enough(answers):
                break
            time.sleep(max(0.001, min(pause(waited), timeout - waited)))
        self.silent = {sent.node for sent in [*needed, *spoilt]}
        self._overdue |= waiting
        over = [message_id for message_id, sent in self._overdue.items() if sent.kind not in keep_late]
        for oldest in over[:-_REMEMBERED]:
            del self._overdue[oldest]
        return answers

    def _match(self, reply: Message, waiting: dict[str, _Sent], keep_late: Sequence[str]) -> Answer | None:
        """Return the reply with its message, and forget the message; None where it is of no use."""
        sent_id, source = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        late = self._overdue.get(sent_id)
        sent = waiting.get(sent_id, late)
        stranger = sent is not None and not reply.has_error() and source != sent.node
        if not stranger:  # whose answer must not be taken for that of the node
            self._overdue.pop(sent_id, None)
            waiting.pop(sent_id, None)
        if sent is None or stranger or (late is not None and sent.kind not in keep_late):
            self.dropped += 1
            node = source if sent is None or stranger else sent.node
            log(WARNING, "dropped a reply of node %s that came late, twice or unasked", node)
            return None
        return Answer(sent.node, sent.kind, reply)
