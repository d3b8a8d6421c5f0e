"""A limit on the time that a node computes for a message."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

from umbel.protocol.errors import OutOfTime

_LEAST_S = 1e-6  # what a timer can count; less would stop it

_until: ContextVar[float] = ContextVar("umbel_until", default=math.inf)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in what runs inside once so many seconds have gone by; infinite is no limit.

    It is raised by `check_time`, and in a process's main thread by a timer as well, wherever Python is.
    What runs inside must leave nothing half done: write it afterwards.
    """
    if math.isinf(seconds):
        yield
        return
    token = _until.set(time.monotonic() + seconds)
    # Python runs handlers in the main thread alone. A timer that is set is somebody else's.
    timed = threading.current_thread() is threading.main_thread() and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    before = signal.signal(signal.SIGALRM, _raise) if timed else None
    try:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, _LEAST_S))
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        _until.reset(token)


def check_time() -> None:
    """Raise `OutOfTime` where there is no time left."""
    if time.monotonic() > _until.get():
        _raise()


def _raise(_number: int = 0, _frame: FrameType | None = None) -> None:
    raise OutOfTime("the site's time for a message is over; max-seconds sets it", code="time.over")
