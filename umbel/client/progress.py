"""A node's progress within a round: the clients done and the time left, in the node's own log.

No reply contains any of it. At a site, only the site reads its log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from logging import INFO
from typing import TypeVar

from umbel.protocol.durations import in_time
from umbel.protocol.flower import log

T = TypeVar("T")

_EVERY_S = 10.0  # a shorter round gets no line but the server's
_ROUNDING = 1e-6


@dataclass
class _Watch:
    """Logs the share of some work that is done, at most every ten seconds."""

    text: str
    clients: int
    clock: Callable[[], float]
    began: float = field(init=False)
    told: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.told = self.clock()

    def note(self, share: float) -> None:
        now = self.clock()
        if now - self.told < _EVERY_S or not 0 < share < 1:
            return
        self.told = now
        left = in_time((now - self.began) / share * (1 - share))
        done = int(share * self.clients + _ROUNDING)
        text = self.text.format(done=done, clients=self.clients)
        log(INFO, "%s, about %s left", text, left)


_part: ContextVar[tuple[_Watch, float, float] | None] = ContextVar("umbel_progress", default=None)


def watched(
    text: str, clients: int, compute: Callable[[slice | list[int]], T], clock: Callable[[], float] = time.monotonic
) -> Callable[[slice | list[int]], T]:
    """Return a version of `compute`, a function of some of the clients, that logs its progress.

    `text` is the beginning of each line, with {done} and {clients}.
    """
    watch, done = _Watch(text, clients, clock), 0

    def computed(some: slice | list[int]) -> T:
        nonlocal done
        count = len(some) if isinstance(some, list) else some.stop - some.start
        token = _part.set((watch, done / max(1, clients), (done + count) / max(1, clients)))
        try:
            return compute(some)
        finally:
            _part.reset(token)
            done += count

    return computed


@contextmanager
def part(begin: float, end: float) -> Iterator[None]:
    """Count the work inside the block as the part of the surrounding work from share `begin` to share `end`."""
    around = _part.get()
    if around is None:
        yield
        return
    watch, first, last = around
    token = _part.set((watch, first + begin * (last - first), first + end * (last - first)))
    try:
        yield
    finally:
        _part.reset(token)


def at(share: float) -> None:
    """Note that a share of the surrounding work is done."""
    if (around := _part.get()) is not None:
        watch, first, last = around
        watch.note(first + share * (last - first))
