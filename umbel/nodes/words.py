"""The codes of refusals, and what has to happen before a node that refuses can take part."""

from __future__ import annotations

import re


def code_in(reason: str) -> str:
    """Return the code of a refusal, such as ``refused.budget``; empty where there is none."""
    found = re.fullmatch(r"refused \[(refused\.[a-z-]{1,40})\](: .*)?", reason)
    return found[1] if found else ""


def moves(reason: str) -> str:
    """Return what has to happen before a node that refuses can take part, if that is known; otherwise empty."""
    from umbel.protocol.project import APP, described  # which a Flower app does not need

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
