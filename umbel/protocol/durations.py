"""Durations as text."""

from __future__ import annotations


def in_time(seconds: float) -> str:
    """Return a duration as text, in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
