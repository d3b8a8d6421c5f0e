"""Calling a site's clients: each computes on its data within its time, and its failure shows nowhere else.

Whether memory or time suffices depends on the number of rows. A missing reply would reveal that, and no ledger would
count it. So clients are charged first, and reply as if nothing had failed: the gate puts a result without an update in
the place of what is late, faulty or not as asked for, and only the site's own log tells.

A client's rows must not change even the last digits of another client's update either: a server can make training so
chaotic that last digits decide first ones. So a site computes one batch at a time, by default a single client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import chain
from logging import ERROR
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from umbel.privacy.site.config import Site
from umbel.privacy.site.time_limit import time_limit
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import Refused, UmbelError
from umbel.protocol.log import log
from umbel.protocol.release import RowPrivacy

Places = slice | list[int]
"""The places of some clients among those of a task."""
Results = list[NDArray[Any]]
"""Arrays of some clients, a row each."""


class OnGpu(Protocol):
    """Releases of simulated clients, made on the GPU that trains them."""

    @property
    def arrays(self) -> Arrays:
        """The releases, once the GPU has done what it was asked."""

    def release(self, part: slice, trained: Any, start: Any) -> None:
        """Release consecutive clients, which trained from `start`; both are tensors (m, n) on the GPU."""


@dataclass(frozen=True)
class Work:
    """The computation of a task's clients on their data.

    Attributes
    ----------
    compute : callable
        ``compute(places)`` returns the results of the clients at these places.
    batches : sequence of slice or list of int
        The places that a site computes together; a list has several clients, each of which gets the bits that it would
        get alone. Each client by itself if there are none.
    threads : int
        Number of batches that are computed at a time.
    around : context manager
        Entered while clients compute.
    interrupts : bool
        Whether the end of the time interrupts `compute` (`umbel.privacy.site.time_limit`).
    rows : RowPrivacy or None
        How training hides each row, if it does.
    without_rows : callable, optional
        Where training hides rows: what clients without rows send, with its noise, in the place of a failure.
    keep : callable
        Gets the results of all clients before any is released; with `on_gpu` they are the releases.
    on_gpu : callable, optional
        In simulation on a GPU: ``on_gpu(places, releases)`` computes too, and its results are releases (`OnGpu`).
    """

    compute: Callable[[Places], Results]
    batches: Sequence[Places] = ()
    threads: int = 1
    around: AbstractContextManager[Any] = field(default_factory=nullcontext)
    interrupts: bool = False
    rows: RowPrivacy | None = None
    without_rows: Callable[[Places], Results] | None = None
    keep: Callable[[Results], None] = lambda _: None
    on_gpu: Callable[[Places, OnGpu], Results] | None = None


def computed(
    site: Site,
    clients: int,
    work: Work,
    instead: Callable[[Places], Results],
    check: Callable[[Places, Results], None] = lambda *_: None,
    hides: bool = True,
) -> Results:
    """Return what so many clients compute within the site's time, and `instead` for clients that fail.

    At a site each client has an equal share of the time. A batch of several has half of its clients' shares. If it
    fails, they are computed one by one, each in the other half of its share. In simulation all clients are computed
    together, and errors are raised; so they are where a site `hides` none, as of exact losses.

    `instead` also says which types and shapes results have; `check` raises where they are otherwise not as asked for.
    """
    seconds, like = site.policy.max_seconds, instead(slice(0, 0))

    def attempt(places: Places, limit: float) -> Results:
        with time_limit(limit, work.interrupts):
            results = work.compute(places)
        count = len(places if isinstance(places, list) else range(clients)[places])
        shapes = [(one.dtype, (count, *one.shape[1:])) for one in like]
        if not isinstance(results, list) or [_form(one) for one in results] != shapes:
            raise Refused("clients return other arrays than the task asks for", code="refused.result")
        check(places, results)
        return results

    with work.around:
        if site.simulated:
            return attempt(slice(0, clients), seconds)
        batches = work.batches or [slice(c, c + 1) for c in range(clients)]
        share, missing = seconds / math.ceil(clients / work.threads), np.ones(clients, bool)
        found = [np.empty((clients, *one.shape[1:]), one.dtype) for one in like]

        def outcome(places: Places, limit: float) -> Results | BaseException:
            try:
                return attempt(places, limit)
            except KeyboardInterrupt:  # a user ends the node
                raise
            except BaseException as error:  # such as a panic in Rust, or SystemExit: silence would tell of the data
                return error

        def outcomes(batch: Places) -> list[tuple[Places, Results | BaseException]]:
            if not isinstance(batch, list):
                return [(batch, outcome(batch, share))]
            together = outcome(batch, len(batch) * share / 2)
            if not isinstance(together, BaseException):
                return [(batch, together)]
            return [(one, outcome(one, share / 2)) for one in (slice(c, c + 1) for c in batch)]

        for places, results in chain.from_iterable(_each(outcomes, batches, work.threads, seconds)):
            if not isinstance(results, BaseException):
                _put(found, places, results)
                missing[places] = False
            elif hides:
                log_failure("for a client, and answers as if it had no update", results)
            else:
                raise results
        if missing.any():
            failed = np.flatnonzero(missing).tolist()
            _put(found, failed, instead(failed))
    return found


def _form(result: Any) -> tuple[Any, Any]:
    """Return the type and shape of an array; of anything else what no array has."""
    return (result.dtype, result.shape) if type(result) is np.ndarray else (None, None)


def _put(found: Results, places: Places, results: Results) -> None:
    for rows, own in zip(found, results, strict=True):
        rows[places] = own


def _each(
    function: Callable[[Places], list[Any]], batches: Sequence[Places], threads: int, seconds: float
) -> Iterator[list[Any]]:
    """Yield the results of batches, in any order; those that are not there after so many seconds are left out."""
    if threads == 1:
        yield from map(function, batches)
        return
    pool = ThreadPoolExecutor(threads)
    try:
        # Each thread looks for progress and for the time left where the work begins.
        results = [pool.submit(copy_context().run, function, batch) for batch in batches]
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
