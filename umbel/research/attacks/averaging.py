"""Asking one client again and again: the mean of what it releases.

Noise is drawn anew each time and the update is the same, where the server sends the same hypothesis: so the noise in
the mean of T releases is that of one, divided by the square root of T. Averaging makes nu into nu / sqrt(T) for
T n / nu of the paper's budget. Nothing but a limit on what a client may spend stops it; with a guarantee, T releases
within one budget show no more than one that spends it all, since each then has sqrt(T) times the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from umbel.models.model import Parameters
from umbel.protocol.errors import FleetError


def averaged(ask: Callable[[], Sequence[Parameters]], times: int) -> tuple[list[Parameters], int]:
    """Return the means of what is answered, and how often it is.

    Parameters
    ----------
    ask : callable
        Returns the gradient that each client shows, with fresh noise.
    times : int
        How often clients are asked, unless the gate refuses before, as it does when a budget is spent.

    Raises
    ------
    FleetError
        When the gate refuses the first time.
    """
    total = [dict(one) for one in ask()]
    answered = 1
    while answered < times:
        try:
            following = ask()
        except FleetError:
            break
        for one, other in zip(total, following, strict=True):
            for name, value in other.items():
                one[name] += value
        answered += 1
    return [{name: value / answered for name, value in one.items()} for one in total], answered
