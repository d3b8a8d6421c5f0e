"""Where a run stands: its rounds so far, and the hypotheses."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from umbel.protocol.arrays import Arrays

# The end of a run: a tenth of its rounds, at least so many, and so many releases a hypothesis. A
# given one of k equal groups is missed by chance in that many releases less often than once in 20,000.
LAST_PART, MIN_ROUNDS, RELEASES_EACH = 10, 5, 10
_ALL = 0.95  # the share of releases that is as good as all: now and then one strays
_STRAYS = 0.5  # Eq. 9's ratio from which on one can
_DIVERGED = 3.0  # times the lowest loss; where noise is all that moves hypotheses, losses go up and down by less


@dataclass(frozen=True)
class Round:
    """What came out of a round.

    Attributes
    ----------
    number : int
        From 1. The last entry of a run evaluates what its last training round left.
    loss, metric : float or None
        Of the hypotheses that the round started from, over the validation clients that answered.
    asked, releases, lost_nodes : int
        Clients asked to train, clients that released, nodes that did not answer.
    groups : list of int
        Releases that went to each hypothesis.
    nearest : list of float
        Distance from each hypothesis that the round started from to the nearest other one; empty for k = 1.
    moved : bool
        Whether there were releases enough to move the hypotheses.
    best_round : int
        The round whose starting hypotheses had the lowest loss so far.
    median_participations, max_participations : float
        Over all training clients, up to this round.
    seconds : float
    dropped : int
        Replies that came late, twice or unasked, and releases that lie too far from what was sent.
    loss_spread, metric_spread : list of float
        How the validation clients differ (`umbel.protocol.releases.SPREAD`); empty without validation.
    ratio : list of float
        Both sides of the group privacy paper's Eq. 9 as a ratio, which it assumes to be far below 1: the longest
        sanitised update assigned to each hypothesis, as a part of the distance to the nearest other one. 0 where there
        were none; empty for k = 1, and where releases were not assigned.
    exact_reports : int
        Validation clients that reported without noise. No guarantee covers these.
    """

    number: int
    loss: float | None
    metric: float | None
    asked: int
    releases: int
    lost_nodes: int
    groups: list[int]
    nearest: list[float]
    moved: bool
    best_round: int
    median_participations: float
    max_participations: int
    seconds: float
    dropped: int = 0
    loss_spread: list[float] = field(default_factory=list)
    metric_spread: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    exact_reports: int = 0

    @property
    def line(self) -> str:
        """The round in JSON."""
        return json.dumps(asdict(self))


@dataclass
class State:
    """Where a run stands; all that is needed to go on with it.

    Attributes
    ----------
    hypotheses : dict of ndarray, each (k, \\*shape)
        What the next round starts from.
    best : dict of ndarray, each (k, \\*shape)
        The hypotheses of lowest validation loss so far, or the newest without validation.
    best_loss : float
    best_round : int
    stale : int
        Validations since the best one.
    history : list of Round
    stopped : str
        Why the run ended; empty while it goes on.
    """

    hypotheses: Arrays
    best: Arrays
    best_loss: float = math.inf
    best_round: int = 0
    stale: int = 0
    history: list[Round] = field(default_factory=list)
    stopped: str = ""


def diverged(history: Sequence[Round]) -> bool:
    """Return whether the rounds led away from the best hypotheses: the last loss is several times the lowest."""
    losses = [entry.loss for entry in history if entry.loss is not None]
    return bool(losses) and losses[-1] > _DIVERGED * abs(min(losses))


def last_rounds(history: Sequence[Round]) -> list[Round]:
    """Return the rounds at the end of the training by which it is judged who still gets releases.

    They are the last tenth of those that moved the hypotheses, at least five, and as many as
    hold ten releases a hypothesis. A run too short for that has none.
    """
    moved = [entry for entry in history if entry.moved]
    size = max(MIN_ROUNDS, math.ceil(len(moved) / LAST_PART))
    if size > len(moved):
        return []
    enough = RELEASES_EACH * len(moved[-1].groups)
    while sum(sum(entry.groups) for entry in moved[-size:]) < enough:
        size += 1
        if size > len(moved):
            return []
    return moved[-size:]


def collapsed(history: Sequence[Round]) -> bool:
    """Return whether a run has become one of a single model: nearly all its last releases are of one hypothesis.

    Where Eq. 9's ratio is below 1/2 no release can stray, since none is half of the way from its hypothesis to the
    next. A release of another hypothesis then comes from a client that trained it: a small group keeps its own model.
    """
    last = last_rounds(history)
    # Rounds of other hypotheses say nothing of these.
    if not last or len(last[-1].groups) == 1 or len({len(entry.groups) for entry in last}) > 1:
        return False
    totals = [sum(groups) for groups in zip(*(entry.groups for entry in last), strict=True)]
    if not max(totals) >= _ALL * sum(totals) > 0:
        return False
    winner = totals.index(max(totals))
    return not any(
        sum(entry.groups) > entry.groups[winner] for entry in last if entry.ratio and max(entry.ratio) < _STRAYS
    )


def middle_ratio(rounds: Sequence[Round]) -> float | None:
    """Return the median over rounds of Eq. 9's ratio, each the largest over hypotheses; None where it is not known."""
    found = [max(entry.ratio) for entry in rounds if entry.ratio]
    return statistics.median(found) if found else None
