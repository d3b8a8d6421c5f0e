"""The guarantee of all releases together for each row of a client: between two data sets that differ by one row.

A release of a client that trained by DP-SGD costs a row as much as the steps of that training: what happens to its
result afterwards costs nothing more. If the client chose among hypotheses, the choice depends on all rows, and
randomised response costs a row what it costs the client. An open choice leaves no such bound, also in a site's sums.

Another data set of a client by one row is another data set of the client. So any release with a guarantee for clients
costs a row at most what it costs the client. But only the steps hide a row in a client's local parameters too, with
which its next training begins. So releases with both bounds all count by their steps, or all releases by what they cost
the client, whichever is less. A mixture is no bound: one release, cheap by its noise, could let local parameters depend
on a row, and the next, cheap by its steps, could show them.

A release whose training hides rows has a least price (`LEAST_PRICE`), however much noise it has. Noise hides what
leaves, and nothing else: how long a client takes, and whether a fault stopped it, may show outside. So a budget also
bounds how often a server can look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache

from umbel.privacy.accounting.accountant import NO_GRID, compose
from umbel.privacy.accounting.guarantee import (
    DELTA,
    Guarantee,
    as_float,
    choice_loss,
    gap,
    guarantee,
    losses,
    pure_spent,
)
from umbel.privacy.accounting.odometer import Curve, to_date
from umbel.privacy.mechanisms.base import Loss
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.privacy.mechanisms.sampled_gaussian import cut_delta, step_losses
from umbel.protocol.release import Kind, Release, exact

LEAST_PRICE = 0.01
"""The least mu of Gaussian differential privacy, and the least pure epsilon, of a release whose training hides rows.

That is what one look costs through normal noise of a hundred times a row's effect. A row budget of 1 ends after a few
hundred of these; a planned run of fewer participations does not notice it.
"""


def row_guarantee(releases: Mapping[Release, int], delta: float = DELTA) -> Guarantee | None:
    """Return the guarantee to a row of a client that made these numbers of releases; None if there is none."""
    some = {release: times for release, times in releases.items() if times}
    if any(row_gap(release) for release in some):
        return None
    if not some:
        return Guarantee(0.0, 0.0, delta)
    pure, of_client = as_float(_pure_spent(some)), guarantee(some, delta)
    least = max(of_client.epsilon, as_float(least_price(some))) if of_client else pure
    if any(map(by_steps, some)):
        least = min(least, _uncut(some, delta, lambda delta: _composed(frozenset(some.items()), delta)))
    return Guarantee(pure, least, delta)


def row_gap(release: Release) -> str:
    """Return why a release has no guarantee for rows; empty if it has one."""
    if by_steps(release) or not (why := gap(release)):
        return ""
    if release.by_rows:
        return f"the choice among {release.hypotheses or 'several'} hypotheses is open"
    return why


def within_row_budget(releases: Mapping[Release, int], budget: Fraction, delta: float) -> bool:
    """Return whether an epsilon of `budget` at `delta` holds for rows, even if a server chose parameters during the
    run.

    Sums of pure epsilons hold then, and so does the odometer (`umbel.privacy.accounting.odometer`), which holds at all
    times at once. Releases exceed the budget only if both do.
    """
    if any(row_gap(release) for release, times in releases.items() if times):
        return False
    return _pure_spent(releases) <= budget or (delta > 0 and rows_to_date(releases, delta) <= budget)


def rows_to_date(releases: Mapping[Release, int], delta: float) -> float:
    """Return the epsilon that a row has spent, for any sequence of releases at any time; infinite without a bound."""
    some = {release: times for release, times in releases.items() if times}
    if any(row_gap(release) for release in some):
        return math.inf
    curves = [(curves_of(release), times) for release, times in some.items()]
    return _uncut(some, delta, lambda delta: to_date(curves, _pure_spent(some), delta))


def least_price(releases: Mapping[Release, int]) -> Fraction:
    """Return the least pure epsilon of releases for a row."""
    return exact(LEAST_PRICE) * sum(times for release, times in releases.items() if release.by_rows)


def _pure_spent(releases: Mapping[Release, int]) -> Fraction | float:
    """Return the pure epsilon of all releases together for a row."""
    return max(pure_spent(releases), least_price(releases))


def _uncut(releases: Mapping[Release, int], delta: float, epsilon_at: Callable[[float], float]) -> float:
    """Return the epsilon at `delta` of releases, given their epsilon at any delta if no sample were cut.

    The samples that are cut take their part of delta, which is far below its last digit unless epsilon says nothing
    anyway.
    """

    def cut(epsilon: float) -> float:
        parts = ((one.row_rate, one.row_steps, times) for one, times in releases.items() if by_steps(one))
        return sum(times * cut_delta(rate, steps, epsilon) for rate, steps, times in parts)

    epsilon = epsilon_at(delta)
    if math.isinf(epsilon) or delta - cut(epsilon) == delta:
        return epsilon
    epsilon = epsilon_at(delta / 2)
    return epsilon if cut(epsilon) <= delta / 2 else math.inf


@lru_cache(maxsize=1024)
def curves_of(release: Release) -> Curve:
    """Return the Renyi divergences of a release for a row."""
    return Curve.of(_losses(release))


def by_steps(release: Release) -> bool:
    """Return whether the steps of training and a hidden choice are all that its result reveals about a row."""
    hidden = not release.chooses or (release.kind is Kind.TRAIN and release.choice_epsilon > 0)
    return release.by_rows and hidden


def _losses(release: Release) -> dict[Loss, int]:
    """Return the losses, with their numbers, that together bound a release for a row: by its steps if possible."""
    if not by_steps(release):
        return dict.fromkeys(losses(release), 1)
    found = step_losses(release.row_noise_multiplier, release.row_rate, release.row_steps)
    if release.chooses:
        found[choice_loss(release)] = 1
    missing = LEAST_PRICE**2 - sum(count * loss.deviation**2 for loss, count in found.items())
    return _added(found, {GaussianLoss(math.sqrt(missing)): 1}) if missing > 0 else found


@lru_cache(maxsize=4096)
def _composed(releases: frozenset[tuple[Release, int]], delta: float) -> float:
    """Return the epsilon at `delta` of releases that have a guarantee for rows, by their steps where they have any."""
    total: dict[Loss, int] = {}
    for release, often in releases:
        total = _added(total, {loss: often * count for loss, count in _losses(release).items()})
    try:
        return compose(total, delta)
    except NO_GRID:
        return math.inf


def _added(one: Mapping[Loss, int], other: Mapping[Loss, int]) -> dict[Loss, int]:
    """Return losses with their numbers from both."""
    return {loss: one.get(loss, 0) + other.get(loss, 0) for loss in (*one, *other)}
