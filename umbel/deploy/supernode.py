"""A site's SuperNode: Flower's, which looks for messages more often while there are any.

    umbel site supernode --superlink HOST:PORT --isolation=process ...

takes the options of Flower's ``flower-supernode``. That looks every three seconds, which is most of a round of a small
model; this looks as seldom only where no message has come for a minute. Where the server is slow to answer it looks
more seldom still: the looks of many sites that have nothing to do would hold up those that have.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import typer

from umbel.protocol.cli import PASSES_ON, command_line
from umbel.protocol.flower import run_supernode
from umbel.protocol.polling import pause

# The fewest seconds between looks for a message, and those between looks for its reply.
_SHORTEST, _REPLY = 0.5, 0.1
# How many times as long as a look took there is none, and the most seconds; the server answers in some hundredths of a
# second if it has time.
_RESTS, _LONGEST = 20.0, 10.0
_FLOWERS_OWN = 3.0  # seconds that Flower waits between two looks for a message; it waits less for a reply


class Pace:
    """How long the SuperNode waits between two looks for a message, where Flower would wait 3 seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._woke: float | None = None  # when the look began that ends with the next wait
        self._took = 0.0  # what the look before that took

    def seconds(self, flowers_own: float) -> float:
        """Return how long to wait where Flower would wait so many seconds."""
        now = self._clock()
        if flowers_own < _FLOWERS_OWN:
            # It waits for the reply to a message, which it then sends.
            self._last, self._woke = now, None
            return min(_REPLY, flowers_own)
        before, self._took = self._took, 0.0 if self._woke is None else now - self._woke
        # One look alone may be slow for any reason.
        rest = min(_RESTS * min(before, self._took), _LONGEST)
        seconds = max(rest, pause(now - self._last, _SHORTEST, flowers_own))
        self._woke = now + seconds
        return seconds


def run(arguments: Sequence[str]) -> NoReturn:
    """Run a SuperNode with the options of ``flower-supernode`` until it ends."""
    pace = Pace()
    run_supernode(arguments, lambda seconds: time.sleep(pace.seconds(seconds)))
    sys.exit()


def main(context: typer.Context) -> None:
    """Start the SuperNode alone, with the options of flower-supernode: the executor is in another container."""
    run(context.args)


app = command_line(main, **PASSES_ON)
