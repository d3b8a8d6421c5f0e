"""Computing on clients' data within the site's time limit, so that a failure reveals nothing to the server."""

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

_LEAST_S = 1e-6  # the smallest time that a timer can count; 0 would stop it

_until: ContextVar[float] = ContextVar("umbel_until", default=math.inf)


def undisclosed(
    site: Site,
    clients: int,
    compute: Callable[[slice], list[NDArray[Any]]],
    nothing: Callable[[], list[NDArray[Any]]],
    needed: bool = True,
) -> list[NDArray[Any]]:
    """Compute on clients' data within the site's time limit; only the site learns of failures.

    Whether memory or time suffices depends on the number of rows. A missing reply would reveal that, free of charge. So
    clients are charged and answered as if nothing had gone wrong, and the gate treats missing numbers like those of
    diverged training.

    Each client is computed separately, in its share of the time. If clients are computed together, one's rows change
    the last digits of another's update. Training that a server makes chaotic turns last digits into first ones. Then
    one client's release would reveal something about another.

    `compute` returns arrays of some of the clients, one a row, and `nothing` the rows of all clients that failed.
    Clients that report their loss without noise do not need this protection (`needed`). In simulation there is none:
    errors are raised.
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
        except (KeyboardInterrupt, SystemExit):  # a user ends the node
            raise
        except BaseException as error:  # a Rust library raises this when it panics
            log_failure("for a client, and answers as if it had no update", error)
            continue
        for rows, row in zip(found, own, strict=True):
            rows[client] = row[0]
    return found


def log_failure(what: str, error: BaseException) -> None:
    """Write a failed computation and its reason to the node's own log."""
    trace = None if isinstance(error, UmbelError) else error
    log(ERROR, "umbel could not compute %s: %s", what, error, exc_info=trace)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` inside after so many seconds; infinite means no limit.

    `check_time` raises it, and in a process's main thread also a timer, at any point in Python. So the code inside must
    leave nothing half done: write results afterwards.
    """
    if math.isinf(seconds):
        yield
        return
    token = _until.set(time.monotonic() + seconds)
    # Python runs handlers only in the main thread. A timer that is already set belongs to other code.
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
    """Raise `OutOfTime` if no time is left."""
    if time.monotonic() > _until.get():
        _raise()


def _raise(_number: int = 0, _frame: FrameType | None = None) -> None:
    raise OutOfTime("the site's time for a message is over; max-seconds sets it", code="time.over")
