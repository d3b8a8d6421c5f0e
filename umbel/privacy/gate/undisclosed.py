"""Computing on clients' data so that a failure tells the server nothing."""

from __future__ import annotations

from collections.abc import Callable
from logging import ERROR
from typing import Any

from numpy.typing import NDArray

from umbel.privacy.gate.site import Site
from umbel.privacy.gate.time_limit import time_limit
from umbel.protocol.errors import UmbelError
from umbel.protocol.flower import log


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

    Parameters
    ----------
    site : Site
    clients : int
    compute : callable
        Returns arrays of some of the clients, one a row.
    nothing : callable
        Returns the rows of clients that could not be computed.
    needed : bool
        Whether to protect clients: not those that report their loss without noise. In simulation no
        client is protected, and an error is raised.
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
