"""The status of a run at real sites: which sites are there, and whether the run waits for some.

The ServerApp writes ``status.json`` into the run's folder at the start and the end, after each round and in a pause.
The command ``umbel server status`` reads it.
"""

from __future__ import annotations

import time
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from umbel.nodes.presence import Presence
from umbel.nodes.roster import TRAIN, Roster
from umbel.protocol.run_config import RunConfig

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
    """One site of a run.

    Attributes
    ----------
    name : str
        As registered; ``node NUMBER`` without a name.
    presence : Presence
    since : float
        When the presence began, in seconds since 1970; 0 at the start of the run.
    seen : float
        Its last reply to a round, in seconds since 1970; 0 for none.
    training, validation : int
        Number of clients.
    releases : int
        Over all training clients and rounds.
    refusals : dict from str to int
        Refused messages by code; the code is empty if the site tells none.
    """

    name: str = Field(max_length=_LONGEST)
    presence: Presence
    since: float
    seen: float
    training: int = Field(ge=0)
    validation: int = Field(ge=0)
    releases: int = Field(ge=0)
    refusals: dict[str, int]


class Status(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A run.

    Attributes
    ----------
    round, rounds : int
        The round that is next or under way, and the maximum.
    pause_below : int
        Sites without which a round waits.
    written : float
        In seconds since 1970.
    paused, ends : float
        Start and latest end of the current pause, in seconds since 1970; 0 without one.
    sites : tuple of SiteStatus
    state : RunState
    """

    round: int
    rounds: int
    pause_below: int
    written: float
    paused: float = 0.0
    ends: float = 0.0
    sites: tuple[SiteStatus, ...] = ()
    state: RunState = RunState.RUNNING


def status_of(
    run: RunConfig,
    roster: Roster,
    round: int,
    participations: NDArray[np.int64],
    paused: float = 0.0,
    ends: float = 0.0,
    state: RunState = RunState.RUNNING,
) -> Status:
    """Return the status of a run before a round, or after its end."""
    placed = roster.place(TRAIN, np.flatnonzero(participations))
    released = participations[participations != 0]
    sites = []
    for node, hosting in roster.nodes:
        at = roster.state(node, round)
        site = SiteStatus(
            name=roster.names[node].removeprefix("site ")[:_LONGEST],
            presence=at.presence,
            since=at.since,
            seen=roster.seen.get(node, 0.0),
            training=hosting.train,
            validation=hosting.validation,
            releases=int(released[placed.get(node, ([], []))[0]].sum()),
            refusals=dict(roster.refusals.get(node, {})),
        )
        sites.append(site)
    return Status(
        round=round,
        rounds=run.rounds,
        pause_below=run.wait.below,
        written=time.time(),
        paused=paused,
        ends=ends,
        sites=tuple(sites),
        state=state,
    )
