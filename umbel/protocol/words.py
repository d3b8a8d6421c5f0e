"""Numbers of things in words, for logs, errors and reports."""

from __future__ import annotations


def count_of(number: int, one: str, many: str = "") -> str:
    """Return a number of things in words, as "1 round" or "1,200 rounds"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
