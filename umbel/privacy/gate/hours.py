"""The hours in which a site answers, such as ``mon-fri 20:00-06:00, sat-sun``, in the time zone of its machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WHOLE_DAY = timedelta(days=1)
_PART = re.compile(
    rf"(?:(?P<first>{'|'.join(_DAYS)})(?:-(?P<last>{'|'.join(_DAYS)}))?)?"
    r"(?:(?:^|\s+)(?P<opens>\d\d:\d\d)-(?P<closes>\d\d:\d\d))?"
)


@dataclass(frozen=True)
class Window:
    """A time of day on some days of the week (Monday is 0); one that ends before it begins ends on the next day."""

    days: frozenset[int]
    opens: timedelta
    closes: timedelta

    def holds(self, now: datetime) -> bool:
        """Return whether a time lies in this window."""
        time = now - now.replace(hour=0, minute=0, second=0, microsecond=0)
        today, yesterday = now.weekday() in self.days, (now.weekday() - 1) % 7 in self.days
        if self.opens < self.closes:
            return today and self.opens <= time < self.closes
        return (today and time >= self.opens) or (yesterday and time < self.closes)


@lru_cache
def windows(text: str) -> Sequence[Window]:
    """Return the windows in a text, separated by commas; none for an empty text.

    Raises
    ------
    ValueError
        If a part is not days, hours, or both.
    """
    return [_window(part.strip().lower()) for part in text.split(",")] if text.strip() else []


def is_open(text: str, now: datetime) -> bool:
    """Return whether a site with these hours answers now; it always does if it sets none."""
    found = windows(text)
    return not found or any(window.holds(now) for window in found)


def _window(part: str) -> Window:
    found = _PART.fullmatch(part)
    if not part or found is None:
        raise ValueError(f'hours must be as in "mon-fri 20:00-06:00, sat-sun", got {part!r}')
    days = frozenset(range(7))
    if first := found["first"]:
        start, end = _DAYS.index(first), _DAYS.index(found["last"] or first)
        days = frozenset((start + i) % 7 for i in range((end - start) % 7 + 1))
    if found["opens"] is None:
        return Window(days, timedelta(), _WHOLE_DAY)
    opens, closes = _time(found["opens"]), _time(found["closes"])
    if opens in (closes, _WHOLE_DAY):
        raise ValueError(f"hours must end after they begin, got {part!r}")
    return Window(days, opens, closes)


def _time(text: str) -> timedelta:
    hours, minutes = map(int, text.split(":"))
    if minutes > 59 or hours * 60 + minutes > 24 * 60:
        raise ValueError(f"{text} is not a time of day from 00:00 to 24:00")
    return timedelta(hours=hours, minutes=minutes)
