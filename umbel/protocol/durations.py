"""Durations and times as text."""

from __future__ import annotations

import time


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
