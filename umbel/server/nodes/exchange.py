"""Messages and their replies: until enough is there, or time is up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import WARNING
from queue import Empty, SimpleQueue
from threading import Thread, current_thread

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from umbel.protocol.flower import ErrorCode, log
from umbel.protocol.polling import pause
from umbel.server.nodes.words import told

# Messages without a reply, of rounds that are over.
_REMEMBERED = 1000
# Threads that pull replies of this round, of others that are of use, and of others that are not.
_LANES = (16, 2, 2)
# Seconds that a look waits for them, and a round's last look, for what it takes from the SuperLink nobody takes again.
_PATIENCE, _LAST = 1.0, 0.2
# A thread is stuck whose reply takes so many times as long as others do, longer than a look and, since nodes may wish
# that others' seem slow, so many seconds at most. Another takes over.
_STUCK, _LONGEST = 4, 10.0
# Requests for a reply; for one that is not there, one.
_REQUESTS = 10
# How often a reply is asked for of which the SuperLink says that it failed: for want of time, or because of the reply.
_TRIES = 5
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


@dataclass(frozen=True)
class _Pulled:
    """What a thread has to say: of a reply that it pulled or that is not there yet, or that it pulls no more."""

    thread: Thread
    message_id: str = ""
    replies: Sequence[Message] = ()
    error: Exception | None = None
    ended: bool = False


class _Line:
    """Messages whose replies are pulled, some at a time, by threads.

    Parameters
    ----------
    lanes : int
        Threads that pull at once, besides those that are stuck.
    done : SimpleQueue of _Pulled
        What they say.
    pulling : set of str
        Messages whose replies are pulled, in this line or another.
    """

    def __init__(self, lanes: int, done: SimpleQueue[_Pulled], pulling: set[str]) -> None:
        self._lanes, self._done, self._pulling = lanes, done, pulling
        self._next: SimpleQueue[str] = SimpleQueue()
        self._looks = 0
        self._last: dict[str, int] = {}  # in which look the reply to a message was asked for
        self._since: dict[Thread, float] = {}  # when each thread began with what it pulls
        self.usual = 0.0
        """Seconds that a reply takes."""

    def look(self, grid: Grid, message_ids: Sequence[str]) -> set[Thread]:
        """Begin threads that ask for replies to messages, for those first that wait longest; return the threads."""
        while True:  # what the last look left over
            try:
                self._pulling.discard(self._next.get_nowait())
            except Empty:
                break
        self._looks += 1
        self._last = {one: self._last.get(one, 0) for one in message_ids}
        new = [one for one in message_ids if one not in self._pulling]
        for one in sorted(new, key=self._last.__getitem__):
            self._pulling.add(one)
            self._next.put(one)
        now, long = time.monotonic(), min(max(_PATIENCE, _STUCK * self.usual), _LONGEST)
        busy = sum(now - since < long for since in list(self._since.values()))
        number = max(0, min(self._lanes - busy, self._next.qsize()))
        lanes = {Thread(target=self._pull, args=(grid,), daemon=True) for _ in range(number)}
        for lane in lanes:
            self._since[lane] = now
            lane.start()
        return lanes

    def learn(self, seconds: float) -> None:
        """Note what a reply took; one that takes far longer than others, as some node may wish, counts little."""
        self.usual += (min(seconds, 2 * self.usual + _PATIENCE / 10) - self.usual) / 8

    def note(self, pulled: _Pulled) -> None:
        """Note that the reply to a message was asked for."""
        self._pulling.discard(pulled.message_id)
        if pulled.message_id in self._last:
            self._last[pulled.message_id] = self._looks

    def _pull(self, grid: Grid) -> None:
        """Pull one reply after the other until one is not there, or there are no more to pull."""
        thread, there = current_thread(), True
        while there:
            try:
                message_id = self._next.get_nowait()
            except Empty:
                break
            self._since[thread] = began = time.monotonic()
            try:
                pulled = _Pulled(thread, message_id, list(grid.pull_messages([message_id])))
                there = bool(pulled.replies)
            except Exception as error:  # judged where it is waited for
                pulled = _Pulled(thread, message_id, error=error)
            if pulled.error is None:
                self.learn((time.monotonic() - began) * (1 if there else _REQUESTS))
            self._done.put(pulled)
        del self._since[thread]
        self._done.put(_Pulled(thread, ended=True))


class _Mailbox:
    """Pulls each reply by itself, in threads.

    A node that cuts off the upload of its reply makes Flower's pull wait for the rest, minutes
    long, and one whose reply Flower cannot read makes it raise. Neither shall hold up a round, or
    take the replies of others along. So each is asked for by itself. While nodes compute, a look does not ask for all
    of them: a thread ends with the first reply that is not there, and the next look goes on behind it.
    """

    def __init__(self) -> None:
        self._done: SimpleQueue[_Pulled] = SimpleQueue()
        self._failures: Counter[str] = Counter()
        pulling: set[str] = set()
        self._lines = [_Line(lanes, self._done, pulling) for lanes in _LANES]

    def pull(
        self, grid: Grid, awaited: Sequence[str], wanted: Sequence[str], overdue: Sequence[str], patience: float
    ) -> tuple[list[Message], list[str]]:
        """Return replies that are there, and the messages whose replies cannot be read.

        A pull that takes longer than `patience` seconds goes on, and its reply is among the next.

        Parameters
        ----------
        grid : Grid
        awaited : sequence of str
            Messages of this round.
        wanted, overdue : sequence of str
            Of others, whose replies are of use, or are not; nobody waits for them, and they are in nobody's way.
        patience : float
        """
        if getattr(grid, "in_process", False):
            return list(grid.pull_messages([*awaited, *wanted, *overdue])), []
        until, lanes = time.monotonic() + patience, set[Thread]()
        for line, message_ids in zip(self._lines, (awaited, wanted, overdue), strict=True):
            lanes |= line.look(grid, message_ids)
        read: list[_Pulled] = []
        unreadable: list[str] = []
        lost: Exception | None = None
        while True:
            try:
                pulled = self._done.get(timeout=max(0.0, until - time.monotonic()) if lanes else 0.0)
            except Empty:
                break
            if pulled.ended:
                lanes.discard(pulled.thread)
                continue
            for line in self._lines:
                line.note(pulled)
            if self._may_come(pulled):
                continue
            if isinstance(pulled.error, _TRANSPORT) and not _failed(pulled.error):
                lost = pulled.error
            elif pulled.error is not None:
                log(WARNING, "a reply cannot be read: %s", told(pulled.error))
                unreadable.append(pulled.message_id)
            elif any(reply.metadata.reply_to_message_id != pulled.message_id for reply in pulled.replies):
                # It would be taken for that of the node whose message it names.
                log(WARNING, "dropped a reply that says it is to another message than it came for")
                unreadable.append(pulled.message_id)
            else:
                read.append(pulled)
        if lost is not None:
            for pulled in read:  # nobody can pull them again
                self._done.put(pulled)
            raise lost
        return [reply for pulled in read for reply in pulled.replies], unreadable

    def _may_come(self, pulled: _Pulled) -> bool:
        """Return whether a reply is to be asked for again: the SuperLink failed, which is no word on the others."""
        if pulled.error is None or not _failed(pulled.error):
            self._failures.pop(pulled.message_id, None)
            return False
        self._failures[pulled.message_id] += 1
        return self._failures[pulled.message_id] < _TRIES


def _failed(error: Exception) -> bool:
    """Return whether a SuperLink answered, and said that it failed."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.is_server_error


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
            wanted = [one for one, sent in self._overdue.items() if sent.kind in keep_late]
            overdue = [one for one, sent in self._overdue.items() if sent.kind not in keep_late]
            patience = min(_PATIENCE, max(left, _LAST))
            replies, unreadable = self._mailbox.pull(grid, [*waiting], wanted, overdue, patience)
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
