"""How often to look for what may come at any time."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHARE = 0.05
# The fewest seconds between looks for a message, and those between looks for its reply.
_SHORTEST, _REPLY = 0.5, 0.1
# How many times as long as a look took there is none, and the most seconds; the server answers in some hundredths of a
# second if it has time.
_RESTS, _LONGEST = 20.0, 10.0


def pause(waited: float, shortest: float = 0.01, longest: float = 0.5) -> float:
    """Return the seconds until the next look, for who has been waiting for so many.

    A twentieth of what was waited: what comes soon is found soon, and what takes long costs few looks.
    """
    return min(longest, max(shortest, _SHARE * waited))


class Pace:
    """How long the SuperNode waits in place of what Flower would wait, in seconds of a clock.

    `longest` is what Flower waits between two looks for a message; it waits less for a reply.
    """

    def __init__(self, longest: float = 3.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest, clock
        self._last = clock()
        self._woke: float | None = None  # when the look began that ends with the next wait
        self._took = 0.0  # what the look before that took

    def seconds(self, flowers_own: float) -> float:
        """Return how long to wait where Flower would wait so many seconds."""
        now = self._clock()
        if flowers_own < self._longest:
            # It waits for the reply to a message, which it then sends.
            self._last, self._woke = now, None
            return min(_REPLY, flowers_own)
        before, self._took = self._took, 0.0 if self._woke is None else now - self._woke
        # One look alone may be slow for any reason.
        rest = min(_RESTS * min(before, self._took), _LONGEST)
        seconds = max(rest, pause(now - self._last, _SHORTEST, flowers_own))
        self._woke = now + seconds
        return seconds
