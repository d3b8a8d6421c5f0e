"""How often to look for what may come at any time."""

from __future__ import annotations

_SHARE = 0.05


def pause(waited: float, shortest: float = 0.01, longest: float = 0.5) -> float:
    """Return the seconds until the next look, for who has been waiting for so many.

    A twentieth of what was waited: what comes soon is found soon, and what takes long costs few looks.
    """
    return min(longest, max(shortest, _SHARE * waited))
