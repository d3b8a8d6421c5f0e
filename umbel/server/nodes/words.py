"""Text from a node, made safe for the server's log."""

from __future__ import annotations

_LONGEST = 300


def told(said: object) -> str:
    """Return text from a node in one short line, without characters that steer a terminal."""
    text = str(said)
    plain = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text[:_LONGEST])
    return plain if len(text) <= _LONGEST else f"{plain}…"
