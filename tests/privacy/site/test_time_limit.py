"""A node computes for a message as long as its site lets it."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.helpers.errors import raises
from umbel.privacy.site.time_limit import check_time, time_limit
from umbel.protocol.errors import OutOfTime


def compute(seconds: float, step: Callable[[], None], interrupts: bool = False) -> None:
    """Go on for ever, within a limit."""
    with time_limit(seconds, interrupts):
        while True:
            step()


def test_without_a_limit_there_is_time_for_ever() -> None:
    check_time()
    with time_limit(math.inf):
        check_time()
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_time_that_is_over_ends_what_runs_inside() -> None:
    with raises(OutOfTime, "time.over", "max-seconds"):
        compute(1e-9, check_time)
    check_time()


def test_foreign_code_that_asks_for_no_time_ends_too() -> None:
    """Also if it goes on after each exception, as with rows that it cannot read."""

    def goes_on() -> None:
        with suppress(Exception):
            while True:
                pass

    with pytest.raises(OutOfTime):
        compute(0.01, goes_on, interrupts=True)


def test_nothing_else_is_interrupted() -> None:
    """An import that ended halfway would stay so in its process."""
    with time_limit(1e-9):
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        with pytest.raises(OutOfTime):
            check_time()


def test_nothing_is_left_of_a_limit() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(3600, interrupts=True):
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 3600
        check_time()
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_timer_of_somebody_elses_is_left_alone() -> None:
    signal.setitimer(signal.ITIMER_REAL, 3600)
    try:
        with pytest.raises(OutOfTime):
            compute(1e-9, check_time, interrupts=True)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_in_another_thread_time_is_looked_at_between_steps() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(OutOfTime):
        pool.submit(compute, 1e-9, check_time).result()
