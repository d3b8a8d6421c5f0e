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
from collections.abc import Callable, Iterable, Mapping
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
    made,
    pure_spent,
)
from umbel.privacy.accounting.odometer import Curve, curve_of, to_date, within
from umbel.privacy.mechanisms.base import Loss
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.privacy.mechanisms.sampled_gaussian import cut_delta, step_losses
from umbel.protocol.release import Kind, Release, exact

LEAST_PRICE = 0.01
"""The least mu of Gaussian differential privacy, and the least pure epsilon, of a release whose training hides rows.

That is what one look costs through normal noise of a hundred times a row's effect. A row budget of 1 ends after a few
hundred of these; a planned run of fewer participations does not notice it.
"""

_MOST_BESIDE_CUTS = Fraction(110)
"""Largest epsilon that Renyi divergences count up to: far above it, the samples that are cut use up delta."""
_OF_DEAREST = 0.9
"""Share of delta for participations that count as the dearest that a site accepts."""


def row_guarantee(releases: Mapping[Release, int], delta: float = DELTA) -> Guarantee | None:
    """Return the guarantee to a row of a client that made these numbers of releases; None if there is none."""
    if (some := made(releases, row_gap)) is None:
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


def within_row_budget(
    releases: Mapping[Release, int],
    budget: Fraction,
    delta: float,
    dearest: Release | None = None,
    reports: bool = False,
) -> bool:
    """Return whether an epsilon of `budget` at `delta` holds for rows, even if a server chose parameters during the
    run.

    Each of three rules is fixed before the first charge, by the site's limits alone, and releases are within the budget
    while one of them is:

    - The sum of pure epsilons.
    - The number of participations, as if each were the dearest that the site accepts: another one reveals no more than
      it, and the composition of so many is fixed in advance. All else counts by pure epsilons, for which a quarter of
      the budget is reserved if training clients report. Where the budget covers the dearest participation at all, this
      rule has most of delta.
    - Renyi divergences at a few orders (`umbel.privacy.accounting.odometer`), with the rest of delta.

    A rule that has refused never accepts again, so their shares of delta add up to delta at most.

    Parameters
    ----------
    releases : mapping from Release to int
    budget : Fraction
    delta : float
        0 for a pure epsilon.
    dearest : Release, optional
        The participation that reveals most of a row among all that the site accepts; None if its limits name none.
    reports : bool
        Whether the site's training clients report.
    """
    if (some := made(releases, row_gap)) is None:
        return False
    if _pure_spent(some) <= budget:
        return True
    if not delta > 0:
        return False
    reserved = budget / 4 if reports else Fraction(0)
    share = 1.0
    if dearest and needed_budget(dearest, 1, delta) <= budget - reserved:
        share -= _OF_DEAREST
        rest = {release: times for release, times in some.items() if not _cheaper(release, dearest)}
        counted = sum(some.values()) - sum(rest.values())
        # The steps of a dearer one would have to count as well, since only steps hide rows in local parameters.
        apart = not any(map(by_steps, rest)) and _pure_spent(rest) <= reserved
        if apart and needed_budget(dearest, counted, delta) <= budget - reserved:
            return True
    covered = min(budget, _MOST_BESIDE_CUTS)
    uncut = _beside_cuts(some, as_float(covered), share * delta)
    return uncut > 0 and within(_total(some.items()), covered, uncut)


def needed_budget(dearest: Release, times: int, delta: float) -> float:
    """Return the row budget at `delta` that covers so many participations, if none is dearer than `dearest`."""
    covered = row_guarantee({dearest: times}, _OF_DEAREST * delta)
    return covered.epsilon if covered else math.inf


def _cheaper(release: Release, dearest: Release) -> bool:
    """Return whether a participation reveals no more of a row than the dearest does, by its steps and its choice."""
    return (
        by_steps(release)
        and release.row_noise_multiplier >= dearest.row_noise_multiplier
        and release.row_rate <= dearest.row_rate
        and release.row_steps <= dearest.row_steps
        and (not release.chooses or (dearest.chooses and release.choice_epsilon <= dearest.choice_epsilon))
    )


def rows_to_date(releases: Mapping[Release, int], delta: float) -> float:
    """Return the epsilon that a row has spent, for any sequence of releases at any time; infinite without a bound."""
    if (some := made(releases, row_gap)) is None:
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
    """Return the epsilon at `delta` of releases, given their epsilon at any delta if no sample were cut."""
    for share in (delta, delta / 2):
        epsilon = epsilon_at(share)
        if math.isinf(epsilon) or _beside_cuts(releases, epsilon, delta) >= share:
            return epsilon
    return math.inf


def _beside_cuts(releases: Mapping[Release, int], epsilon: float, delta: float) -> float:
    """Return what the samples that are cut leave of delta at an epsilon: all, half or nothing.

    Their part is far below the last digit of delta unless epsilon says nothing anyway.
    """
    steps = ((one.row_rate, one.row_steps, times) for one, times in releases.items() if by_steps(one))
    cut = math.fsum(times * cut_delta(rate, count, epsilon) for rate, count, times in steps)
    if delta - cut == delta:
        return delta
    return delta / 2 if cut <= delta / 2 else 0.0


@lru_cache(maxsize=1024)
def curves_of(release: Release) -> Curve:
    """Return the Renyi divergences of a release for a row."""
    return curve_of(_losses(release))


def by_steps(release: Release) -> bool:
    """Return whether the steps of training and a hidden choice are all that its result reveals about a row."""
    hidden = not release.chooses or (release.kind is Kind.TRAIN and release.choice_epsilon > 0)
    return release.by_rows and hidden


def _losses(release: Release) -> dict[Loss, int]:
    """Return the losses, with their numbers, that together bound a release for a row: by its steps if possible."""
    if not by_steps(release):
        return dict.fromkeys(losses(release), 1)
    parts = step_losses(release.row_noise_multiplier, release.row_rate, release.row_steps)
    if release.chooses:
        parts[choice_loss(release)] = 1
    missing = LEAST_PRICE**2 - sum(count * loss.deviation**2 for loss, count in parts.items())
    if missing > 0:
        rest = GaussianLoss(math.sqrt(missing))
        parts[rest] = parts.get(rest, 0) + 1
    return parts


@lru_cache(maxsize=4096)
def _composed(releases: frozenset[tuple[Release, int]], delta: float) -> float:
    """Return the epsilon at `delta` of releases that have a guarantee for rows, by their steps where they have any."""
    try:
        return compose(_total(releases), delta)
    except NO_GRID:
        return math.inf


def _total(releases: Iterable[tuple[Release, int]]) -> dict[Loss, int]:
    """Return the losses of releases together, with their numbers."""
    total: dict[Loss, int] = {}
    for release, often in releases:
        for loss, count in _losses(release).items():
            total[loss] = total.get(loss, 0) + often * count
    return total
