"""The status of a run at real sites: which sites are there, and whether the run waits for some.

The ServerApp writes ``status.json`` into the run's folder at the start and the end, after each round and in a pause.
The command ``umbel server status`` reads it.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from umbel.nodes.roster import TRAIN, Roster
from umbel.protocol.presence import Presence
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import Hosting

FILE = "status.json"
_LONGEST = 300  # of a name


class RunState(StrEnum):
    """Whether a run is under way, or how it ended. The status of a run whose process was killed grows old."""

    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"
    """Before its last round: by its patience, by an observer, by its sites or by people."""
    FAILED = "failed"


class SiteStatus(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """One site of a run. Times are in seconds since 1970."""

    name: str = Field(max_length=_LONGEST)  # as registered; ``node NUMBER`` without a name
    presence: Presence
    since: float  # when the presence began; 0 at the start of the run
    seen: float  # its last reply to a round; 0 for none
    training: int = Field(ge=0)  # clients
    validation: int = Field(ge=0)
    releases: int = Field(ge=0)  # over all training clients and rounds
    refusals: dict[str, int]  # refused messages by code; the code is empty if the site tells none


class Status(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A run. Times are in seconds since 1970."""

    round: int  # next, or under way
    rounds: int  # at most
    pause_below: int  # sites without which a round waits
    written: float
    paused: float = 0.0  # start of the current pause; 0 without one
    ends: float = 0.0  # its latest end
    sites: tuple[SiteStatus, ...] = ()
    state: RunState = RunState.RUNNING


def status_of(run: RunConfig, roster: Roster, round: int, participations: NDArray[np.int64], **more: Any) -> Status:
    """Return the status of a run before a round, or after its end; more fields are those of `Status`."""
    placed, released = roster.place(TRAIN, np.flatnonzero(participations)), participations[participations != 0]

    def of_site(node: int, hosting: Hosting) -> SiteStatus:
        at = roster.state(node, round)
        return SiteStatus(
            name=roster.names[node].removeprefix("site ")[:_LONGEST],
            presence=at.presence,
            since=at.since,
            seen=roster.seen.get(node, 0.0),
            training=hosting.train,
            validation=hosting.validation,
            releases=int(released[placed.get(node, ([], []))[0]].sum()),
            refusals=dict(roster.refusals.get(node, {})),
        )

    sites = tuple(of_site(*each) for each in roster.nodes)
    return Status(round=round, rounds=run.rounds, pause_below=run.wait.below, written=time.time(), sites=sites, **more)
