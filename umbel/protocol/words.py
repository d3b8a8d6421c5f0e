"""Numbers, durations, times and hints in words, for logs, errors and reports."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable

_LONGEST = 300  # of a text from a node


def count_of(number: int, one: str, many: str = "") -> str:
    """Return a number of things in words, as "1 round" or "1,200 rounds"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def after_round(number: int) -> str:
    """Return when the hypotheses of a line of a run's history were there: "after round 3"."""
    return f"after round {number}" if number else "at the start (round 0)"


def one_line(text: str) -> str:
    """Return text that may be another's, with escapes for all that would begin a line or act on a terminal."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def as_line(text: object) -> str:
    """Return text from a node in one short line, without characters that steer a terminal."""
    plain = one_line(str(text)[:_LONGEST])
    return plain if len(str(text)) <= _LONGEST else f"{plain}…"


def in_time(seconds: float) -> str:
    """Return a duration as text, in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def at_time(seconds: float) -> str:
    """Return a time, in seconds since 1970, as text: the date and the minute on this machine's clock."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return the end of an error about an unknown name, which asks for the nearest of those that are known, if any."""
    near = difflib.get_close_matches(str(name), [*map(str, known)], 1)
    return f"; did you mean {near[0]}?" if near else ""
