"""A ClientApp that computes nothing, so that its rounds show what ``flwr run`` itself takes.

Its first reply of a kind is that of umbel's own ClientApp, and every later one is the same again.
"""

from __future__ import annotations

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from umbel.client.app import app as umbels

_replies: dict[str, RecordDict] = {}  # not in the app, which Ray copies for each message


class Repeating(ClientApp):
    """Replies as the first time."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply."""
        kind = message.metadata.message_type
        if kind not in _replies:
            _replies[kind] = umbels(message, context).content
        return Message(_replies[kind], reply_to=message)


app = Repeating()
