"""Computing on clients' data within the site's time, and so that a failure tells the server nothing."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging import ERROR
from types import FrameType
from typing import Any

from numpy.typing import NDArray

from umbel.privacy.gate.site import Site
from umbel.protocol.errors import OutOfTime, UmbelError
from umbel.protocol.flower import log

_LEAST_S = 1e-6  # what a timer can count; less would stop it

_until: ContextVar[float] = ContextVar("umbel_until", default=math.inf)


def undisclosed(
    site: Site,
    clients: int,
    compute: Callable[[slice], list[NDArray[Any]]],
    nothing: Callable[[], list[NDArray[Any]]],
    needed: bool = True,
) -> list[NDArray[Any]]:
    """Compute on clients' data within the site's time; only the site learns what goes wrong.

    Whether memory or time is enough depends on how many rows there are. A missing reply would
    tell that, for nothing. So clients are charged and answered as if nothing had gone wrong, and the
    gate treats missing numbers as those of training that blew up.

    Each client is computed by itself, in its own share of the time. Of clients that are computed
    together, one's rows change the last digits of another's update, and training that a server makes
    chaotic turns last digits into first ones: then one client's release would tell of another.

    `compute` returns arrays of some of the clients, one a row, and `nothing` the rows of all that could not be
    computed. Clients that report their loss without noise are not `needed` to be protected. They are not protected
    in simulation either: there an error is raised.
    """
    seconds = site.policy.max_seconds
    if site.simulated or not needed:
        with time_limit(seconds):
            return compute(slice(0, clients))
    found = nothing()
    for client in range(clients):
        try:
            with time_limit(seconds / clients):
                own = compute(slice(client, client + 1))
        except (KeyboardInterrupt, SystemExit):  # somebody ends the node
            raise
        except BaseException as error:  # as a library's code in Rust raises where it panics
            log_failure("for a client, and answers as if it had no update", error)
            continue
        for rows, row in zip(found, own, strict=True):
            rows[client] = row[0]
    return found


def log_failure(what: str, error: BaseException) -> None:
    """Write to the node's own log what could not be computed, and why."""
    trace = None if isinstance(error, UmbelError) else error
    log(ERROR, "umbel could not compute %s: %s", what, error, exc_info=trace)


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
