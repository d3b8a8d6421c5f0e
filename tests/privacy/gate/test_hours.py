"""Hours in which a site answers."""

from __future__ import annotations

from datetime import datetime

import pytest

from umbel.privacy.gate.hours import is_open, windows

# 2026-11-23 is a Monday.
MON, TUE, SAT, SUN = 23, 24, 28, 29


@pytest.mark.parametrize(
    ("hours", "day", "time", "answers"),
    [
        ("", MON, "00:00", True),
        ("08:00-17:00", MON, "08:00", True),
        ("08:00-17:00", SUN, "16:59", True),
        ("08:00-17:00", MON, "17:00", False),
        ("08:00-24:00", MON, "23:59", True),
        ("mon-fri 20:00-06:00", MON, "05:59", False),  # Sunday's night is not listed
        ("mon-fri 20:00-06:00", MON, "20:00", True),
        ("mon-fri 20:00-06:00", TUE, "05:59", True),
        ("mon-fri 20:00-06:00", SAT, "05:59", True),  # Friday's night
        ("mon-fri 20:00-06:00", SAT, "20:00", False),
        ("sat-mon", SUN, "12:00", True),  # over the end of a week
        ("sat-mon", TUE, "00:00", False),
        ("Sun", SUN, "23:59", True),
        ("mon-fri 20:00-06:00, sat-sun", SUN, "12:00", True),
        ("tue 01:00-02:00, mon 01:00-02:00", MON, "01:30", True),
    ],
)
def test_a_site_answers_in_its_hours_only(hours: str, day: int, time: str, answers: bool) -> None:
    hour, minute = map(int, time.split(":"))
    assert is_open(hours, datetime(2026, 11, day, hour, minute)) is answers


@pytest.mark.parametrize(
    "hours",
    [
        "always",
        "8-17",
        "08:00-08:00",
        "24:00-06:00",
        "08:60-09:00",
        "25:00-26:00",
        "mon-",
        "mon,,tue",
        "08:00",
        "mon08:00-09:00",
    ],
)
def test_hours_that_cannot_be_read_are_refused(hours: str) -> None:
    with pytest.raises(ValueError, match=r"hours|time"):
        windows(hours)
