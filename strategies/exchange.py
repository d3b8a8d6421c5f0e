"""Messages and their replies: until enough is there, or time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import WARNING

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore import log

# Seconds between looks. Short at first, for simulations; then a share of the time waited.
_SHORTEST, _LONGEST, _SHARE = 0.01, 0.5, 0.05
# Messages without a reply, of rounds that are over.
_REMEMBERED = 1000


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


@dataclass(frozen=True)
class _Sent:
    """What must be remembered of a message; its content may be large."""

    node: int
    kind: str


class Exchange:
    """Sends messages and collects their replies, round after round.

    Attributes
    ----------
    dropped : int
        Replies of the last round that were of no use: late, doubled, or from a node that was not
        asked.
    silent : set of int
        Nodes that owe a reply of the last round.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self.silent: set[int] = set()
        self._overdue: dict[str, _Sent] = {}

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
        stored = set(grid.push_messages(list(messages)))
        data = [message.metadata for message in messages]
        waiting = {one.message_id: _Sent(one.dst_node_id, one.message_type) for one in data if one.message_id in stored}
        if len(waiting) < len(messages):
            log(WARNING, "%d of %d messages could not be sent", len(messages) - len(waiting), len(messages))
        began = time.monotonic()
        answers: list[Answer] = []
        while True:
            for reply in grid.pull_messages([*waiting, *self._overdue]):
                answer = self._match(reply, waiting, keep_late)
                if answer is not None:
                    answers.append(answer)
            needed = [sent for sent in waiting.values() if sent.kind not in keep_late]
            waited = time.monotonic() - began
            if not needed or waited >= timeout or enough(answers):
                break
            time.sleep(min(_LONGEST, max(_SHORTEST, _SHARE * waited), timeout - waited))
        self.silent = {sent.node for sent in needed}
        self._overdue |= waiting
        for oldest in list(self._overdue)[:-_REMEMBERED]:
            del self._overdue[oldest]
        return answers

    def _match(self, reply: Message, waiting: dict[str, _Sent], keep_late: Sequence[str]) -> Answer | None:
        """Return the reply with its message, and forget the message; None where it is of no use."""
        sent_id, source = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        late = self._overdue.pop(sent_id, None)
        sent = waiting.pop(sent_id, late)
        stranger = sent is not None and not reply.has_error() and source != sent.node
        if sent is None or stranger or (late is not None and sent.kind not in keep_late):
            self.dropped += 1
            node = source if sent is None or stranger else sent.node
            log(WARNING, "dropped a reply of node %s that came late, twice or unasked", node)
            return None
        return Answer(sent.node, sent.kind, reply)
