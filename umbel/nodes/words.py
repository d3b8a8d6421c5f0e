"""Text from a node, made safe for the server's log, and the names of nodes there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from umbel.protocol.project import APP, described
from umbel.protocol.words import one_line

_LONGEST = 300


class Names(dict[int, str]):
    """Each node's name in the log: a site has that of its registration, another node its number."""

    def __missing__(self, node: int) -> str:
        return f"node {node}"

    def learn(self, registered: Mapping[int, str]) -> None:
        """Take over the names of registered nodes; those without a name are empty."""
        self.update((node, f"site {told(name)}") for node, name in registered.items() if name)


def code_in(reason: str) -> str:
    """Return the code of a refusal, such as ``refused.budget``; empty where there is none."""
    found = re.fullmatch(r"refused \[(refused\.[a-z-]{1,40})\](: .*)?", reason)
    return found[1] if found else ""


def moves(reason: str) -> str:
    """Return what has to happen before a node that refuses can take part, if that is known; otherwise empty."""
    if (code := code_in(reason)) in _MOVES:
        return f": {_MOVES[code]}"
    found = re.match(r"this site runs umbel ([0-9][\w.+-]{0,30}), bundle", reason)
    if found is None or not (APP / "pyproject.toml").exists():
        return ""
    theirs, own = found[1], str(described()["version"])
    if theirs == own:
        fix = "start it from the site's files"
    elif _ordered(theirs) < _ordered(own):
        fix = "upgrade umbel at the site"
    else:
        fix = f"start the run with umbel {theirs}"
    return f". This run has umbel {own}: {fix}"


PASSING = {
    "refused.waits": "its people have to approve the run",
    "refused.too-many-wait": "its people have to decide on other requests first",
}
"""Refusals that end by themselves, or by people of the site."""
_MOVES = PASSING | {"refused.version": "use the same umbel on both sides"}


def _ordered(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def told(said: object) -> str:
    """Return text from a node in one short line, without characters that steer a terminal."""
    text = str(said)
    plain = one_line(text[:_LONGEST])
    return plain if len(text) <= _LONGEST else f"{plain}…"
