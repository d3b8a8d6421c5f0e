"""The time that a site allows for computing on its clients' data."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

from umbel.protocol.errors import Interrupted, OutOfTime

_LEAST_S = 1e-6  # the smallest time that a timer can count; 0 would stop it

_until: ContextVar[float] = ContextVar("umbel_until", default=math.inf)


@contextmanager
def time_limit(seconds: float, interrupts: bool = False) -> Iterator[None]:
    """Let `check_time` raise `OutOfTime` inside after so many seconds of computation; infinite means no limit.

    The seconds are the thread's own, so that a busy machine ends no computation.

    If it `interrupts`, a timer also ends what runs inside, at any point in Python, an import included. That is for
    foreign code alone, which does not look at the clock: Flower answers each message of a site in a separate process,
    and what is half done ends with it.
    """
    if math.isinf(seconds):
        yield
        return
    token = _until.set(time.thread_time() + seconds)
    # Python runs handlers only in the main thread. A timer that is already set belongs to other code.
    in_main = threading.current_thread() is threading.main_thread()
    timed = interrupts and in_main and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    before = signal.signal(signal.SIGALRM, _interrupt) if timed else None
    try:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, _LEAST_S))
        yield
    except Interrupted:
        raise _over() from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        _until.reset(token)


def check_time() -> None:
    """Raise `OutOfTime` if no time is left."""
    if time.thread_time() > _until.get():
        raise _over()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


def _over() -> OutOfTime:
    return OutOfTime("the site's time for a message is over; max-seconds sets it", code="time.over")
