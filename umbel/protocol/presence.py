"""Whether a node can be asked, and if not, why and for how long."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

_LONGEST_ABSENCE = 15  # rounds
_LONGEST_PAUSE_S = 300.0  # seconds for which a paused run leaves out a node that failed to reply or refused


class Presence(StrEnum):
    """Whether a node can be asked, and if not, why."""

    ONLINE = "online"
    LATE = "late"
    """It may still be at work for a round that is over."""
    SILENT = "silent"
    """It did not reply."""
    REFUSED = "refused"
    """It refused; its own log says why."""
    OFFLINE = "offline"
    """It is not connected to the server."""
    CHANGED = "changed"
    """It hosts other clients than before the run was interrupted."""


@dataclass(frozen=True)
class Absence:
    """Why a node is left out and since when, in seconds since 1970; 0 since the start of the run.

    Also how often in a row it failed to reply or refused, and the last round that it is left out of for that.

    While a run is paused, no rounds pass, so that the absence also ends at a time by the clock of `time.monotonic`.
    """

    times: int = 0
    until: int = 0
    presence: Presence = Presence.SILENT
    since: float = 0.0
    ends: float = 0.0

    @classmethod
    def following(cls, before: Absence | None, round: int, presence: Presence = Presence.SILENT) -> Absence:
        """Return the absence after another failure: one round at first, then twice as many plus one each time."""
        times, since = (1, time.time()) if before is None else (before.times + 1, before.since)
        ends = time.monotonic() + min(2.0**times, _LONGEST_PAUSE_S)
        return cls(times, round + min(2**times - 1, _LONGEST_ABSENCE), presence, since, ends)
