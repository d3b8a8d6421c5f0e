"""A site's SuperNode: Flower's, which looks for messages more often while there are any.

    python -m deployment.supernode --superlink HOST:PORT --isolation=process ...

takes the options of Flower's ``flower-supernode``. That looks every three seconds, which is most of a round of a small
model; this looks as seldom only where no message has come for a minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from protocol.flower import run_supernode
from protocol.polling import pause

# The fewest seconds between looks for a message, and those between looks for its reply.
_SHORTEST, _REPLY = 0.5, 0.1


class Pace:
    """How long the SuperNode waits in place of what Flower would wait.

    Parameters
    ----------
    longest : float
        What Flower waits between two looks for a message; it waits less for a reply.
    clock : callable
        Seconds.
    """

    def __init__(self, longest: float = 3.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest, clock
        self._last = clock()

    def seconds(self, flowers_own: float) -> float:
        """Return how long to wait where Flower would wait so many seconds."""
        if flowers_own < self._longest:
            # It waits for the reply to a message.
            self._last = self._clock()
            return min(_REPLY, flowers_own)
        return pause(self._clock() - self._last, _SHORTEST, flowers_own)


def run(arguments: Sequence[str]) -> NoReturn:
    """Run a SuperNode with the options of ``flower-supernode`` until it ends."""
    pace = Pace()
    run_supernode(arguments, lambda seconds: time.sleep(pace.seconds(seconds)))
    sys.exit()


if __name__ == "__main__":
    run(sys.argv[1:])
