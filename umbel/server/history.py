"""The state of a run: its rounds so far, and the hypotheses."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.arrays import Arrays, flatten

# The end of a run: a tenth of its rounds, with minimum numbers of rounds and of releases for each hypothesis. The
# probability that a given one of k equal groups gets none of that many releases is below 1 in 20,000.
LAST_PART, MIN_ROUNDS, RELEASES_EACH = 10, 5, 10
_ALL = 0.95  # share of releases that counts as all: a few may stray
_STRAYS = 0.5  # Eq. 9's ratio from which releases can stray
_MADE_IN = 10  # last rounds that show how many clients a hypothesis suits; a single round varies by chance
_DIVERGED = 3.0  # times the lowest loss; if only noise moves hypotheses, losses vary by less
_TELLING = 2.0  # deviations of the noise in a difference of losses, within which it tells nothing
_AT_BOUND = 0.9  # of a bound: losses above it are mostly clipped
_ROUNDING = 1e-5  # of the highest loss; below it, losses differ by rounding errors


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of training and the validation of what came of it: a line of ``history.jsonl``."""

    number: int  # from 1; 0 is before the first, for the first hypotheses
    # After the round, over the validation clients that replied; known one exchange later than the training.
    loss: float | None = None
    metric: float | None = None
    asked: int = 0  # clients asked to train
    releases: int = 0  # clients that released
    lost_nodes: int = 0  # nodes without a valid reply
    groups: list[int] = field(default_factory=list)  # releases for each hypothesis
    nearest: list[float]
    """Distance of each hypothesis after the round to the nearest other one; empty for k = 1."""
    moved: bool = False  # whether there were enough releases to move the hypotheses
    best_round: int = 0  # after which the loss was lowest so far; the newest without a finite loss
    median_participations: float = 0.0  # over all training clients, up to this round
    max_participations: int = 0
    seconds: float = 0.0  # of the exchange that trained; it may have validated the round before
    dropped: int = 0  # late, repeated or unexpected replies, and releases too far from the hypotheses, in that exchange
    # Quantiles over validation clients (`umbel.protocol.releases.SPREAD`); empty without validation.
    loss_spread: list[float] = field(default_factory=list)
    metric_spread: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    """The ratio of both sides of the group privacy paper's Eq. 9, which assumes that it is far below 1: the longest
    sanitised update assigned to each hypothesis, relative to its distance to the nearest other one before the round. 0
    without releases; empty for k = 1, and if releases were not assigned."""
    exact_reports: int = 0  # validation clients that reported without noise; no guarantee covers these
    report_noise: float = 0.0  # standard deviation of the noise in loss and metric
    report_bound: float = 0.0  # to which reports were clipped; 0 for neither
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of that exchange's stages: ``pause`` for lack of sites, ``sites`` from the first message to the last
    reply, ``validation`` and ``aggregation``."""

    @property
    def undefined(self) -> bool:
        """Whether there were enough releases, but the next hypotheses would not have been finite."""
        return not self.moved and any(self.groups)

    @property
    def line(self) -> str:
        """The round as JSON."""
        return json.dumps(asdict(self))


@dataclass
class State:
    """The state of a run; it suffices to resume the run."""

    hypotheses: Arrays  # for the next round, each (k, *shape)
    best: Arrays  # of lowest validation loss so far, or the latest without a finite one
    best_loss: float = math.inf
    best_round: int = 0
    stale: int = 0  # validations since the best one
    history: list[Round] = field(default_factory=list)  # its last entry may not be validated yet
    stopped: str = ""  # why the run ended; empty while it runs

    @classmethod
    def first(cls, hypotheses: Arrays) -> State:
        """Return the state of a run before its first round."""
        return cls(hypotheses, hypotheses, history=[Round(number=0, nearest=distances(flatten(hypotheses)))])


def distances(hypotheses: NDArray[np.float64]) -> list[float]:
    """Return the distance from each of the hypotheses (k, n) to the nearest other one."""
    if len(hypotheses) == 1:
        return []
    between = np.sqrt([np.square(hypotheses - each).sum(axis=1) for each in hypotheses])
    np.fill_diagonal(between, np.inf)
    nearest: list[float] = between.min(axis=1).tolist()
    return nearest


def fitted(entry: Round, k: int) -> Round:
    """Return a round without what it says of another number of hypotheses: a strategy may change their number."""
    apart = k if k > 1 else 0
    groups = [0] * k if entry.asked and len(entry.groups) != k else entry.groups
    return replace(entry, groups=groups, nearest=entry.nearest if len(entry.nearest) == apart else [math.nan] * apart)


def diverged(history: Sequence[Round]) -> bool:
    """Return whether training moved away from the best hypotheses: the last loss is several times the lowest."""
    losses = [entry.loss for entry in history if entry.loss is not None]
    rounding = _ROUNDING * max(filter(math.isfinite, losses), default=0.0)
    return bool(losses) and losses[-1] > max(_DIVERGED * abs(min(losses)), rounding)


def undecided(history: Sequence[Round], best_round: int) -> int:
    """Return how many other rounds have a loss that noise does not tell from that of the best round."""
    scored = {entry.number: entry for entry in history if entry.loss is not None}
    if (best := scored.get(best_round)) is None:
        return 0
    return sum(
        abs((entry.loss or 0.0) - (best.loss or 0.0)) <= _TELLING * math.hypot(entry.report_noise, best.report_noise)
        for number, entry in scored.items()
        if number != best_round and entry.report_noise + best.report_noise > 0
    )


def at_bound(history: Sequence[Round]) -> float:
    """Return the bound at which the reports of validation clients lie, as far as their noise tells; 0 if they do not.

    Beyond the bound all losses look alike.
    """
    clipped = [entry for entry in history if entry.loss is not None and entry.report_bound]
    if not clipped:
        return 0.0
    mean = statistics.fmean(entry.loss or 0.0 for entry in clipped)
    noise = math.hypot(*(entry.report_noise for entry in clipped)) / len(clipped)
    bound = clipped[-1].report_bound
    return bound if mean + noise >= _AT_BOUND * bound else 0.0


def stuck(history: Sequence[Round]) -> bool:
    """Return whether no round changed the loss, as where training diverges at every client.

    A client whose numbers are not finite releases the hypothesis that it got, so that its reply says nothing about its
    rows; updates that are far too long are left out.
    """
    losses = [entry.loss for entry in history if entry.loss is not None]
    return len(losses) > 1 and len({*losses}) == 1 and losses[0] != 0


def last_rounds(history: Sequence[Round]) -> list[Round]:
    """Return the rounds at the end of training that show which hypotheses still get releases.

    They are the last tenth of the rounds that moved the hypotheses, at least five, and enough for ten releases for each
    hypothesis. A shorter run has none.
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
    """Return whether a run has collapsed into one model: nearly all its last releases belong to one hypothesis.

    If Eq. 9's ratio is below 1/2 no release can stray, since none is half of the way from its hypothesis to the next. A
    release of another hypothesis then comes from a client that trained it: a small group keeps its own model.
    """
    last = last_rounds(history)
    # Rounds with other hypotheses say nothing about these.
    if not last or len(last[-1].groups) == 1 or len({len(entry.groups) for entry in last}) > 1:
        return False
    totals = [sum(groups) for groups in zip(*(entry.groups for entry in last), strict=True)]
    if not max(totals) >= _ALL * sum(totals) > 0:
        return False
    winner = totals.index(max(totals))
    return not any(
        sum(entry.groups) > entry.groups[winner] for entry in last if entry.ratio and max(entry.ratio) < _STRAYS
    )


def shares_of(history: Sequence[Round], best_round: int, k: int) -> NDArray[np.float64]:
    """Return the share of the releases (k,) of each of k hypotheses, in the ten rounds that made them last.

    They are those up to `best_round`. Equal shares where there were no releases.
    """
    made = [
        entry.groups for entry in history if entry.number <= best_round and len(entry.groups) == k and any(entry.groups)
    ]
    groups = np.sum(made[-_MADE_IN:] or [[1] * k], axis=0, dtype=np.float64)
    shares: NDArray[np.float64] = groups / groups.sum()
    return shares


def middle_ratio(rounds: Sequence[Round]) -> float | None:
    """Return the median over rounds of Eq. 9's ratio, the largest over hypotheses in each; None if it is unknown."""
    largest = [max(entry.ratio) for entry in rounds if entry.ratio]
    return statistics.median(largest) if largest else None
