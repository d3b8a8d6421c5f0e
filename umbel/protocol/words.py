"""Numbers of things in words, for logs, errors and reports."""

from __future__ import annotations


def count_of(number: int, one: str, many: str = "") -> str:
    """Return a number of things in words, as "1 round" or "1,200 rounds"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def one_line(text: str) -> str:
    """Return text that may be another's, with escapes for all that would begin a line or act on a terminal."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
