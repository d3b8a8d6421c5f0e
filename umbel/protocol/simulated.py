"""Whether code runs in a simulation. Only the place where it runs decides, never a message or a setting."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_in_process: ContextVar[bool] = ContextVar("umbel_in_process", default=False)


@contextmanager
def in_process() -> Iterator[None]:
    """Mark the code inside as a simulation in this process (for `umbel.simulation.grid` alone)."""
    token = _in_process.set(True)
    try:
        yield
    finally:
        _in_process.reset(token)


def runs_in_simulation() -> bool:
    """Return whether this code runs in a Ray worker or in the in-process grid."""
    if _in_process.get():
        return True
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE)
