"""A message to a site, as its journal tells of it: what was asked, what was decided and why, and who paid.

It never holds data, and a server cannot make it long.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError, DiskError, LedgerError, ProtocolError, Refused, SiteError
from umbel.protocol.messages import PARTS, TASKS
from umbel.protocol.records import unpack
from umbel.protocol.release import CHANNELS
from umbel.protocol.tasks import LONGEST_NAME, EvaluationSpec, TrainingSpec

_LONGEST_TEXT = 300  # of a text whose length a server or a path decides
_LONGEST_ENTRY = LONGEST_NAME  # of a task
_KEYS = {name: {entry.name for entry in fields(kind)} for name, kind in TASKS.items()}
_KEYS_OF_OTHERS = {"version", "run", "round"}
# The text of these concerns the message or the site's set-up; the text of other errors may contain data.
_TOLD = (Refused, ProtocolError, ConfigError, SiteError, LedgerError, DiskError)


class Decision(StrEnum):
    """The outcome of a message."""

    ANSWERED = "answered"
    PARTLY = "partly"
    """Some of its clients, or one of its two parts, were refused."""
    REFUSED = "refused"
    REPAIRED = "repaired"
    """Not a message: the journal lacked lines, and was repaired."""
    APPROVED = "approved"
    DENIED = "denied"
    """Not messages: the site's people approved a request, or refused it."""


@dataclass
class Entry:
    """A message of a run, by its type: its request in numbers, the number of charges, and why it was refused."""

    run: str = ""
    message: str = ""
    asked: dict[str, Any] = field(default_factory=dict)
    paid: int = 0
    reasons: list[str] = field(default_factory=list)
    charges: int = 0
    """How often clients were charged at once."""
    request: str = ""
    """The request that people approved, or that a researcher signed."""
    sent: list[tuple[str, str]] = field(default_factory=list)
    """The names under which the run sent hypotheses, with the digest of these."""

    @classmethod
    def of(cls, message: Message, context: Context) -> Self:
        """Return the entry of a message that has just arrived."""
        asked = outline(message.content) if message.has_content() else {}
        return cls(str(context.run_id), shortened(message.metadata.message_type), asked)

    def asks(self, task: TrainingSpec | EvaluationSpec, hypotheses: Arrays | None = None) -> None:
        """Note the request of a message whose records are not those of `umbel.protocol.messages`."""
        [name] = (name for name, kind in TASKS.items() if isinstance(task, kind))
        self.asked = {name: _scalars(name, task.to_record())}
        if hypotheses:
            self.asked["hypotheses"] = _sizes(hypotheses)

    def charge(self, clients: int) -> None:
        """Note a charge of so many clients."""
        self.paid, self.charges = self.paid + clients, self.charges + (clients > 0)

    def refuse(self, what: str, error: Exception) -> None:
        """Note why the message, or a part of it, is refused."""
        self.reasons.append(shortened(f"{what}: {told(error)}"))

    def line(self, decision: Decision) -> dict[str, Any]:
        """Return the content of the line."""
        return {
            "kind": "message",
            "run": self.run,
            "message": self.message,
            "asked": self.asked,
            "decision": str(decision),
            "reason": "; ".join(self.reasons),
            "paid": self.paid,
            **({"request": self.request} if self.request else {}),
        }


def told(error: Exception) -> str:
    """Return what the journal says of an error: only its class if its text may contain data."""
    return str(error) if isinstance(error, _TOLD) else f"{type(error).__name__}; see the node's own log"


def outline(content: RecordDict) -> dict[str, Any]:
    """Return a message's request in few words, however much a server has put into it."""
    asked: dict[str, Any] = {}
    for name in (*PARTS, *CHANNELS):
        record = content.get(name)
        if isinstance(record, ConfigRecord):
            asked[name] = _scalars(name, record)
        elif isinstance(record, ArrayRecord):
            asked[name] = {}
            with suppress(ProtocolError):
                asked[name] = _sizes(unpack(record))
    if others := len(set(content) - {*PARTS, *CHANNELS}):
        asked["others"] = others
    return asked


def _scalars(name: str, record: ConfigRecord) -> dict[str, Any]:
    """Return the known entries of a record of that name; for a list its length."""
    known = {key: value for key, value in record.items() if key in _KEYS.get(name, _KEYS_OF_OTHERS)}
    return {key: len(value) if isinstance(value, list) else _scalar(value) for key, value in known.items()}


def _sizes(arrays: Arrays) -> dict[str, Any]:
    """Return k and n of hypotheses."""
    return {
        "k": max((len(value) for value in arrays.values()), default=0),
        "n": sum(math.prod(value.shape[1:]) for value in arrays.values()),
    }


def _scalar(value: Any) -> Any:
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    # In printable ASCII, since other characters take up to twelve times as much space in a line.
    plain = (text := str(value)).isascii() and text.isprintable()
    return shortened(text if plain else ascii(value), _LONGEST_ENTRY)


def shortened(value: Any, longest: int = _LONGEST_TEXT) -> str:
    """Return the beginning of a long text."""
    text = str(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
