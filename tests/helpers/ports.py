"""Ports for the servers that tests start: no two servers of a test run are given the same."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from itertools import cycle

_FIRST, _EACH = 20_000, 500
"""Below those that connections to other programs take (from 32768 on); and as many for each worker of a test run."""


def _ports() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first, skipped = _FIRST + worker % 24 * _EACH, secrets.randbelow(_EACH)
    return cycle([*range(first + skipped, first + _EACH), *range(first, first + skipped)])


_mine = _ports()


def free_port() -> int:
    """Return a free port of this machine; no other caller in this test run is given the same."""
    return next(port for port in _mine if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
