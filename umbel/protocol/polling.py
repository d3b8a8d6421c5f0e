"""How often to look for something that may arrive at any time."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHARE = 0.05
# The shortest pause, in seconds, between looks for a message, and between looks for its reply.
_SHORTEST, _REPLY = 0.5, 0.1
# The pause as a multiple of the time that a look took, and its maximum in seconds. An idle server replies within some
# hundredths of a second.
_RESTS, _LONGEST = 20.0, 10.0
# Flower's pause between two looks for a message; its pauses for a reply are shorter.
_FLOWERS = 3.0


def pause(waited: float, shortest: float = 0.01, longest: float = 0.5) -> float:
    """Return the seconds until the next look, after so many seconds of waiting.

    This is a twentieth of the time waited: early arrivals are found early, and late ones cost few looks.
    """
    return min(longest, max(shortest, _SHARE * waited))


class Pace:
    """Replaces the SuperNode's waiting times, in seconds of a clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._woke: float | None = None  # start of the look that ends with the next wait
        self._took = 0.0  # duration of the look before that

    def seconds(self, flowers_own: float) -> float:
        """Return the seconds to wait where Flower would wait `flowers_own`."""
        now = self._clock()
        if flowers_own < _FLOWERS:
            # Flower waits for the reply to a message, and then sends it.
            self._last, self._woke = now, None
            return min(_REPLY, flowers_own)
        before, self._took = self._took, 0.0 if self._woke is None else now - self._woke
        # A single look may be slow for any reason.
        rest = min(_RESTS * min(before, self._took), _LONGEST)
        seconds = max(rest, pause(now - self._last, _SHORTEST, flowers_own))
        self._woke = now + seconds
        return seconds
