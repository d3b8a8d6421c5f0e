"""Computing on clients' data within the site's time limit, so that a failure reveals nothing to the server."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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


Some = slice | list[int]
"""The places of some clients."""


def undisclosed(
    site: Site,
    clients: int,
    compute: Callable[[Some], list[NDArray[Any]]],
    nothing: Callable[[], list[NDArray[Any]]],
    needed: bool = True,
    batches: Sequence[Some] = (),
) -> list[NDArray[Any]]:
    """Compute on clients' data within the site's time limit; only the site learns of failures.

    Whether memory or time suffices depends on the number of rows. A missing reply would reveal that, free of charge. So
    clients are charged and answered as if nothing had gone wrong, and the gate treats missing numbers like those of
    diverged training.

    `compute` returns arrays of some of the clients, one a row, and `nothing` the rows of all clients that failed.

    A client's rows must not change even the last digits of another's update: training that a server makes chaotic turns
    last digits into first ones. So `compute` is only called for the clients of one of the `batches`, or for a single
    client, and must give each client what it would give that client alone. Each gets an equal share of the time. If a
    batch fails in half of its clients' time, they are computed one by one, each in half of its share: one client's
    failure is no other's.

    Clients that report their loss without noise do not need all this (`needed`): errors are raised. In simulation all
    clients are computed together.
    """
    seconds = site.policy.max_seconds
    if site.simulated:
        with time_limit(seconds):
            return compute(slice(0, clients))
    found, share = nothing(), seconds / clients
    batches = batches or [slice(c, c + 1) for c in range(clients)]

    def fill(some: Some) -> None:
        for rows, own in zip(found, compute(some), strict=True):
            rows[some] = own

    def failure(some: Some, limit: float) -> BaseException | None:
        try:
            with time_limit(limit):
                fill(some)
        except (KeyboardInterrupt, SystemExit):  # a user ends the node
            raise
        except BaseException as error:  # a Rust library raises this when it panics
            return error
        return None

    if not needed:
        with time_limit(seconds):
            for batch in batches:
                fill(batch)
        return found
    for batch in batches:
        ones, limit = [batch], share
        if isinstance(batch, list):
            if failure(batch, len(batch) * share / 2) is None:
                continue
            ones, limit = [slice(c, c + 1) for c in batch], share / 2
        for one in ones:
            if (error := failure(one, limit)) is not None:
                log_failure("for a client, and answers as if it had no update", error)
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
