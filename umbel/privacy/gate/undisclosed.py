"""Computing on clients' data within the site's time limit, so that a failure reveals nothing to the server."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from itertools import chain
from logging import ERROR
from types import FrameType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from umbel.privacy.gate.site import Site
from umbel.protocol.errors import OutOfTime, UmbelError
from umbel.protocol.log import log

T = TypeVar("T")

_LEAST_S = 1e-6  # the smallest time that a timer can count; 0 would stop it

_until: ContextVar[float] = ContextVar("umbel_until", default=math.inf)


Some = slice | list[int]
"""The places of some clients."""
Found = list[NDArray[Any]]
"""Arrays of some clients, one a row."""


@dataclass(frozen=True)
class Apart:
    """How a site computes its clients so that none changes a bit of another's numbers.

    Attributes
    ----------
    batches : sequence of slice or list of int
        The places of the clients that are computed together. A list has several.
    threads : int
        Number of batches that are computed at a time.
    """

    batches: Sequence[Some]
    threads: int = 1


def undisclosed(
    site: Site,
    clients: int,
    compute: Callable[[Some], Found],
    nothing: Callable[[Some], Found],
    needed: bool = True,
    apart: Apart | None = None,
    interrupts: bool = False,
) -> Found:
    """Compute on clients' data within the site's time limit; only the site learns of failures.

    Whether memory or time suffices depends on the number of rows. A missing reply would reveal that, and no ledger
    would count it. So clients are charged, and reply as if nothing had failed; the gate treats missing numbers like
    those of diverged training.

    `compute` returns arrays of some of the clients, and `nothing` those of clients that failed: of training that hides
    rows, what clients without rows would send. The end of the time interrupts `compute` only if it `interrupts`.

    A client's rows must not change even the last digits of another client's update: a server can make training so
    chaotic that last digits decide first ones. So at a site `compute` is called for one batch at a time, by default a
    single client, and must give each client the result that it would have alone. Each client has an equal share of the
    time. A batch of several has half of its clients' shares. If it fails, they are computed one by one, each in the
    other half of its share. So a client's failure affects no other client.

    Clients that report their loss without noise do not need this protection (`needed`): errors are raised. In
    simulation all clients are computed together, and errors are raised too.
    """
    seconds = site.policy.max_seconds
    if site.simulated:
        with time_limit(seconds, interrupts):
            return compute(slice(0, clients))
    apart = apart or Apart([slice(c, c + 1) for c in range(clients)])
    share, missing = seconds / math.ceil(clients / apart.threads), np.ones(clients, bool)
    found = [np.empty((clients, *one.shape[1:]), one.dtype) for one in nothing(slice(0, 0))]

    def attempt(some: Some, limit: float) -> Found | BaseException:
        """Compute some clients within a time limit; return the error if that fails."""
        try:
            with time_limit(limit, interrupts):
                return compute(some)
        except (KeyboardInterrupt, SystemExit):  # a user ends the node
            raise
        except BaseException as error:  # a Rust library raises this when it panics
            return error

    def answers(batch: Some) -> list[tuple[Some, Found | BaseException]]:
        if not isinstance(batch, list):
            return [(batch, attempt(batch, share))]
        together = attempt(batch, len(batch) * share / 2)
        if not isinstance(together, BaseException):
            return [(batch, together)]
        return [(one, attempt(one, share / 2)) for one in (slice(c, c + 1) for c in batch)]

    for batch, answer in chain.from_iterable(_each(answers, apart, seconds)):
        if not isinstance(answer, BaseException):
            _put(found, batch, answer)
            missing[batch] = False
        elif needed:
            log_failure("for a client, and answers as if it had no update", answer)
        else:
            raise answer
    if missing.any():
        failed = np.flatnonzero(missing).tolist()
        _put(found, failed, nothing(failed))
    return found


def _put(found: Found, batch: Some, answer: Found) -> None:
    for rows, own in zip(found, answer, strict=True):
        rows[batch] = own


def _each(function: Callable[[Some], T], apart: Apart, seconds: float) -> Iterator[T]:
    """Yield the results of batches, in any order; those that are not there after so many seconds are left out."""
    if apart.threads == 1:
        yield from map(function, apart.batches)
        return
    pool = ThreadPoolExecutor(apart.threads)
    try:
        # Each thread looks for progress and for the time left where the work begins.
        results = [pool.submit(copy_context().run, function, batch) for batch in apart.batches]
        for result in as_completed(results, None if math.isinf(seconds) else seconds):
            yield result.result()
    except TimeoutError:
        log(ERROR, "umbel leaves out clients whose computation never ends: max-seconds is over")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def log_failure(what: str, error: BaseException) -> None:
    """Write a failed computation and its reason to the node's own log."""
    trace = None if isinstance(error, UmbelError) else error
    log(ERROR, "umbel could not compute %s: %s", what, error, exc_info=trace)


@contextmanager
def time_limit(seconds: float, interrupts: bool = False) -> Iterator[None]:
    """Let `check_time` raise `OutOfTime` inside after so many seconds of computation; infinite means no limit.

    The seconds are the thread's own, so that a busy machine ends no computation.

    If it `interrupts`, a timer also raises it, at any point in Python, an import included. That is for foreign code
    alone, which does not look at the clock: Flower answers each message of a site in a separate process, and what is
    half done ends with it.
    """
    if math.isinf(seconds):
        yield
        return
    token = _until.set(time.thread_time() + seconds)
    # Python runs handlers only in the main thread. A timer that is already set belongs to other code.
    in_main = threading.current_thread() is threading.main_thread()
    timed = interrupts and in_main and signal.getitimer(signal.ITIMER_REAL)[0] == 0
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
    if time.thread_time() > _until.get():
        _raise()


def _raise(_number: int = 0, _frame: FrameType | None = None) -> None:
    raise OutOfTime("the site's time for a message is over; max-seconds sets it", code="time.over")
