"""Text from a node, made safe for the server's log, and what nodes are called there."""

from __future__ import annotations

from collections.abc import Mapping

_LONGEST = 300


class Names(dict[int, str]):
    """What the log calls each node: a site by the name of its registration, others by their numbers."""

    def __missing__(self, node: int) -> str:
        return f"node {node}"

    def learn(self, registered: Mapping[int, str]) -> None:
        """Take over the names of registered nodes; those without a name are empty."""
        self.update((node, f"site {told(name)}") for node, name in registered.items() if name)


def told(said: object) -> str:
    """Return text from a node in one short line, without characters that steer a terminal."""
    text = str(said)
    plain = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text[:_LONGEST])
    return plain if len(text) <= _LONGEST else f"{plain}…"
