"""Messages and their replies: wait until there are enough, or time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import Message, RecordDict

from umbel.nodes.transport import Transport
from umbel.protocol.asked import Names
from umbel.protocol.flower import ErrorCode
from umbel.protocol.log import log
from umbel.protocol.polling import pause
from umbel.protocol.words import as_line, in_time

# Number of messages without a reply to remember, from rounds that are over.
_REMEMBERED = 1000
# Seconds that a look waits for replies on their way, and a round's last look; an unread reply is not sent again.
_PATIENCE, _LAST = 1.0, 0.2
_LEEWAY_S = 5.0
_TELL_S = 60.0  # between two lines about a round that takes long
# An error of a client app counts as a reply; these errors are Flower's own.
_GONE = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)


@dataclass(frozen=True)
class Answer:
    """A reply, with the node and the type of the message it is for.

    If a node is gone, the SuperLink itself makes an error reply, and names itself as the sender. So only the
    message that was sent shows which node a reply belongs to.
    """

    node: int
    kind: str
    reply: Message

    @property
    def gone(self) -> bool:
        """Whether the SuperLink says that the node is gone, or did not get to reply. The node itself cannot say so."""
        by_node = self.reply.metadata.src_node_id == self.node
        return self.reply.has_error() and self.reply.error.code in _GONE and not by_node


@dataclass(frozen=True)
class _Sent:
    """The remembered part of a message; its content may be large."""

    node: int
    kind: str
    expires: float
    """When Flower stops delivering it, by the clock of `time.monotonic`."""


class Exchange:
    """Sends messages and collects their replies, round after round.

    Attributes
    ----------
    dropped : int
        Useless replies in the last round: late, repeated, or from a node that was not asked.
    silent : set of int
        Nodes whose reply in the last round is missing or unreadable, or whose message could not be sent.
    names : Names
        Each node's name in the log.
    watch : callable
        Called each minute of a round; it may raise, to end the run.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.names = Names()
        self.watch: Callable[[], None] = lambda: None
        self.dropped = 0
        self.silent: set[int] = set()
        self._overdue: dict[str, _Sent] = {}

    def awaited(self, kind: str) -> set[int]:
        """Return the nodes whose reply to a message of a type is missing, from any round."""
        return {sent.node for sent in self._overdue.values() if sent.kind == kind}

    def connected(self) -> set[int]:
        """Return the connected nodes, and learn their names."""
        nodes = self.transport.nodes()
        self.names.learn(nodes)
        return set(nodes)

    def late(self, keep_late: Sequence[str] = ()) -> set[int]:
        """Return the nodes that may still be at work for a round that is over.

        A node that wakes up answers each message that waits for it, and its clients are charged for each.
        """
        now = time.monotonic()
        return {sent.node for sent in self._overdue.values() if sent.kind not in keep_late and now < sent.expires}

    def run(
        self,
        messages: Sequence[Message],
        timeout: float,
        enough: Callable[[Sequence[Answer]], bool] = lambda _: False,
        keep_late: Sequence[str] = (),
        name: str = "",
    ) -> list[Answer]:
        """Send messages and return the replies.

        Parameters
        ----------
        timeout : float
            Maximum seconds of waiting.
        enough : callable
            Whether the replies so far suffice, so that waiting can end.
        keep_late : sequence of str
            Types of message whose late replies are kept. A round does not wait for them.
        name : str
            Of the round, for a line of the log each minute; empty for none.

        Returns
        -------
        list of Answer
            At most one for each message, in any order.
        """
        self.dropped = 0
        for message in messages:
            if message.metadata.message_type not in keep_late:
                # A node that picked it up after the round would train, and be charged, for nothing. Flower itself would
                # stop delivering it after twelve hours.
                message.metadata.ttl = timeout
        stored = self.transport.send(messages)
        began = logged = time.monotonic()
        data = [message.metadata for message in messages]
        waiting = {
            sent.message_id: _Sent(sent.dst_node_id, sent.message_type, began + sent.ttl)
            for sent in data
            if sent.message_id in stored
        }
        unsent = {
            sent.dst_node_id for sent in data if sent.message_id not in stored and sent.message_type not in keep_late
        }
        for node in sorted(unsent):
            log(WARNING, "%s got no message: it is no longer registered", self.names[node])
        answers: list[Answer] = []
        spoilt: list[_Sent] = []
        while True:
            left = max(0.0, began + timeout - time.monotonic())
            wanted = [message_id for message_id, sent in self._overdue.items() if sent.kind in keep_late]
            overdue = [message_id for message_id, sent in self._overdue.items() if sent.kind not in keep_late]
            patience = min(_PATIENCE, max(left, _LAST))
            replies, unreadable = self.transport.collect((waiting, wanted, overdue), patience)
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
            if name and time.monotonic() - logged >= _TELL_S:
                logged, asked = time.monotonic(), [sent for sent in data if sent.message_type not in keep_late]
                there = sum(answer.kind not in keep_late for answer in answers)
                log(INFO, "%s: %d of %d nodes have replied, after %s", name, there, len(asked), in_time(waited))
                self.watch()
            time.sleep(max(0.001, min(pause(waited), timeout - waited)))
        self.silent = unsent | {sent.node for sent in [*needed, *spoilt]}
        self._overdue |= waiting
        over = [message_id for message_id, sent in self._overdue.items() if sent.kind not in keep_late]
        for oldest in over[:-_REMEMBERED]:
            del self._overdue[oldest]
        return answers

    def stage(
        self, name: str, contents: Mapping[int, RecordDict], enough: int, timeout: float
    ) -> dict[int, RecordDict]:
        """Ask nodes something besides a round's message, and return what they reply.

        Once `enough` have replied, the others have as long again and some seconds more. The name is in Flower's logs.
        """
        if not contents:
            return {}
        messages = [Message(content, node, "query.channel", group_id=name) for node, content in contents.items()]
        began, since = time.monotonic(), 0.0

        def over(answers: Sequence[Answer]) -> bool:
            nonlocal since
            now = time.monotonic()
            if sum(not answer.reply.has_error() for answer in answers) < enough:
                return False
            since = since or now
            return now - since > since - began + _LEEWAY_S

        replies = {}
        for answer in self.run(messages, timeout, over):
            if answer.reply.has_error():
                reason = as_line(answer.reply.error.reason)
                log(WARNING, "%s did not reply about its channel: %s", self.names[answer.node], reason)
            else:
                replies[answer.node] = answer.reply.content
        return replies

    def _match(self, reply: Message, waiting: dict[str, _Sent], keep_late: Sequence[str]) -> Answer | None:
        """Return the reply with its message, and forget the message; None for a useless reply."""
        sent_id, source = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        late = self._overdue.get(sent_id)
        sent = waiting.get(sent_id, late)
        stranger = sent is not None and not reply.has_error() and source != sent.node
        if not stranger:  # its reply must not be taken for the node's
            self._overdue.pop(sent_id, None)
            waiting.pop(sent_id, None)
        if sent is None or stranger or (late is not None and sent.kind not in keep_late):
            self.dropped += 1
            node = self.names[source if sent is None or stranger else sent.node]
            log(WARNING, "dropped a late, repeated or unexpected reply of %s", node)
            return None
        return Answer(sent.node, sent.kind, reply)
