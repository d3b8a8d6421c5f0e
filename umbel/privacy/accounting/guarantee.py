"""The guarantee of all releases together: one epsilon, between any two data sets of a client.

A release with a public radius, the clip norm, is noise around "hypothesis plus update". Any two clipped updates lie
within two radii. The choice of the hypothesis is hidden by randomised response, or there is only one hypothesis. So a
release costs as much as noise and choice together, and the costs of releases add up. If the radius is the norm of the
client's own update, the choice is open, or there is no noise, there is no guarantee.

A site's release is noise around the sums of its clients' updates, and around the number of clients that chose each
hypothesis. Another data set of one client moves one sum by up to two radii. If the client then chooses another
hypothesis, it moves two sums by up to one radius each and two counts by one each. The worse of the two cases at each
epsilon bounds both (docs/explain/guarantee.md, "The extreme pair dominates"). With Gaussian noise on sums and counts
together they are the legs of one distance, of two radii in either case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from umbel.privacy.accounting.accountant import NO_GRID, Either, Together, compose
from umbel.privacy.mechanisms import load
from umbel.privacy.mechanisms.base import Loss, Mechanism
from umbel.privacy.mechanisms.choice import RandomisedResponse
from umbel.privacy.mechanisms.discrete_gaussian import ConcentratedLoss, DiscreteGaussian
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import import_by_name
from umbel.protocol.release import CHANNELS, LAPLACE, Clipping, Kind, Release, exact, report_release

DELTA = 1e-5
"""Delta of printed figures, by default."""

MEANINGFUL = 20
"""Above this epsilon a guarantee says nothing: e**epsilon bounds the ratio of the probabilities under two data sets."""

# How far another data set of one client can move the value that gets noise, in radii.
DISTANCE = {Kind.TRAIN: 2, Kind.SITE: 2, Kind.SECURE: 2, Kind.REPORT: 1}


@dataclass(frozen=True)
class Guarantee:
    """A guarantee between any two data sets of a client."""

    pure: float  # epsilon at delta = 0; infinite where a mechanism has none
    epsilon: float
    """The smaller of the epsilon at `delta` by numerical composition and the pure one. It holds for tasks that were
    fixed in advance; if servers choose them during the run, see `within_budget`."""
    delta: float

    @property
    def is_pure(self) -> bool:
        """Whether the pure epsilon is the number by which to state the guarantee: no delta makes it smaller."""
        return self.delta == 0 or self.epsilon == self.pure


def guarantee(releases: Mapping[Release, int], delta: float = DELTA) -> Guarantee | None:
    """Return the guarantee to a client that made these numbers of releases; None if there is none."""
    if (some := made(releases, gap)) is None:
        return None
    if not some:
        return Guarantee(0.0, 0.0, delta)
    pure = as_float(pure_spent(some))
    return Guarantee(pure, min(pure, composed(frozenset(some.items()), delta)), delta)


def with_before(releases: Mapping[Release, int], before: Release | None) -> dict[Release, int]:
    """Return the releases of a client in a run, and the one that it made before, if any."""
    return {**releases, before: releases.get(before, 0) + 1} if before else dict(releases)


def made(releases: Mapping[Release, int], why: Callable[[Release], str]) -> dict[Release, int] | None:
    """Return the releases that were made, with their numbers; None if one has no guarantee, for which `why` says
    why."""
    some = {release: times for release, times in releases.items() if times}
    return None if any(map(why, some)) else some


def gap(release: Release) -> str:
    """Return why a release has no guarantee; empty if it has one."""
    if not release.noise_multiplier > 0:
        return "the noise hides single rows, and not the client" if release.by_rows else "there is no noise"
    if release.clipping is not Clipping.PUBLIC:
        return "each update is clipped to its own norm, which proves nothing"
    loss = _mechanism(release).loss(release.n, DISTANCE[release.kind])
    if not isinstance(loss, Loss | None):
        text = f"mechanism {release.mechanism}: loss must return an umbel.privacy.mechanisms.base.Loss, or None"
        raise ConfigError(
            f"{text}, not {type(loss).__name__}; for a pure epsilon see Mechanism.pure", code="config.loss"
        )
    if loss is None:
        return f"mechanism {release.mechanism} has no known bound"
    if release.formal and not (_counts(release) and _own_pure(release) is not None and not release.choice_epsilon):
        return ""
    return f"the choice among {release.hypotheses or 'several'} hypotheses is open"


def site_release(release: Release) -> Release:
    """Return the release with which a site's noisy sums charge each client that would otherwise make `release`.

    If the choice costs nothing extra in a site's release, it is recorded without a price.
    """
    alike = replace(release, kind=Kind.SITE)
    if not (release.noise_multiplier > 0 and release.chooses):
        return alike
    return alike if _own_pure(alike) is not None else replace(alike, choice_epsilon=0.0)


def secure_release(release: Release) -> Release:
    """Return the release with which a secure sum charges each client that would otherwise make `release`.

    A count weighs one radius. So a client that chooses another hypothesis moves two sums and two counts by one radius
    each, which is a distance of two radii, as if it moved one sum by two. The choice costs nothing extra.
    """
    return replace(release, kind=Kind.SECURE, choice_epsilon=0.0)


def released_by(by: str, release: Release) -> Release:
    """Return the release with which a client that would make `release` is charged by a channel.

    The channel is looked up by name, since it prices by this account.
    """
    priced: Release = _channel(by).price(release)
    return priced


@cache
def _channel(name: str) -> Any:
    return import_by_name(CHANNELS[name])


def secure_report(noise_multiplier: float, bound: float = 1.0) -> Release:
    """Return the release with which a secure sum charges a client for its loss and metric, each from 0 to `bound`."""
    return report_release(noise_multiplier, bound, DiscreteGaussian.name)


def report_deviation(noise_multiplier: float, bound: float, mechanism: str = LAPLACE) -> float:
    """Return the standard deviation of the noise on a loss, or on a sum of losses, each clipped from 0 to `bound`."""
    return load(mechanism)(noise_multiplier).deviation(2) * math.sqrt(2) * bound


def pure_cost(release: Release) -> Fraction | float:
    """Return the pure epsilon of a release, exactly; infinite if there is no pure bound.

    It is 2 n / nu for vector Laplace noise, plus choice-epsilon if the client chose; for a site's release as for a
    client's.
    """
    return _pure_cost(replace(release, radius=None))


@lru_cache(maxsize=1024)
def _pure_cost(release: Release) -> Fraction | float:
    own = None if gap(release) else _own_pure(release)
    if own is None:
        return math.inf
    return own + (exact(release.choice_epsilon) if release.chooses else 0)


def pure_spent(releases: Mapping[Release, int]) -> Fraction | float:
    """Return the pure epsilon of all releases together."""
    total: Fraction | float = Fraction(0)
    for release, times in releases.items():
        cost = pure_cost(release)
        if isinstance(cost, float):
            return math.inf
        total += cost * times
    return total


def within_budget(
    releases: Mapping[Release, int],
    budget: Fraction,
    delta: float,
    min_noise_multiplier: float = 0.0,
    max_choice_epsilon: float = math.inf,
    reports: bool = False,
) -> bool:
    """Return whether an epsilon of `budget` at `delta` holds, even if a server chose parameters during the run.

    Sums of pure epsilons hold for parameters that are chosen during the run (Rogers et al., 2016). So does the sum of
    mu^2 of Gaussian noise (Smith and Thakurta, 2022): such releases together reveal no more than a Brownian motion with
    drift, observed for a time of that sum. This holds for any choice of the steps. The sum of rho of discrete Gaussian
    noise holds as well (Feldman and Zrnic, 2021).

    For other noise, composition is proven only for parameters that are fixed in advance. So all releases of the sort
    that a client made first count as releases with the least noise that the site accepts. That dominates every choice
    of the server, and is fixed. This sort leaves no room for others, since a server could turn to them at the moment
    that suits it best. But if training clients report, a quarter of the budget is reserved for reports and all other
    sorts, by their pure epsilons.

    Which sort was first is not asked: the releases have to be within the budget whichever it was.

    The releases exceed the budget only if their pure sum does. Otherwise the first sort is within its fixed part of the
    budget, and the others are within theirs.

    Parameters
    ----------
    releases : mapping from Release to int
    budget : Fraction
    delta : float
        0 for a pure epsilon.
    min_noise_multiplier, max_choice_epsilon : float
        The site's limits.
    reports : bool
        Whether the site's training clients report.
    """
    if pure_spent(releases) <= budget:
        return True
    some = made(releases, gap)
    if not delta or some is None:
        return False
    trained = [release for release in some if release.kind is not Kind.REPORT]
    apart = budget / 4 if reports else Fraction(0)
    for first in {_sort(release): release for release in trained or some}.values():
        alike = [release for release in some if _sort(release) == _sort(first)]
        counted = {release: releases[release] for release in alike}
        if _adds_up(first) is None:
            worst = _worst(alike, min_noise_multiplier, max_choice_epsilon)
            if math.isinf(worst.choice_epsilon) or not trained:
                return False
            counted = {worst: sum(counted.values())}
        rest = pure_spent({release: releases[release] for release in some if release not in alike})
        if rest > apart or composed(frozenset(counted.items()), delta) > budget - apart:
            return False
    return True


def _adds_up(release: Release) -> type[Loss] | None:
    """Return the kind of a release's only loss, if a single number describes it and such numbers have a filter."""
    [loss, *more] = losses(release)
    return type(loss) if isinstance(loss, GaussianLoss | ConcentratedLoss) and not more else None


def _worst(alike: Sequence[Release], min_noise_multiplier: float, max_choice_epsilon: float) -> Release:
    """Return the release of one sort that reveals most among all that the site accepts."""
    first = alike[0]
    most_telling = max(max_choice_epsilon, *(one.choice_epsilon for one in alike)) if first.choice_epsilon else 0.0
    return replace(
        first,
        radius=None,
        noise_multiplier=min(min_noise_multiplier or math.inf, *(release.noise_multiplier for release in alike)),
        # A choice between two reveals most.
        hypotheses=2 if first.chooses else 1,
        choice_epsilon=most_telling,
    )


def _sort(release: Release) -> Hashable:
    """Return the sort of a release: releases of one sort differ only in how much noise they have, or add up."""
    return _adds_up(release) or (
        release.kind, release.n, release.mechanism, release.chooses, release.choice_epsilon > 0,
    )  # fmt: skip


def losses(release: Release) -> list[Loss]:
    """Return the privacy losses of a release that has a guarantee."""
    mechanism = _mechanism(release)
    if _counts(release) and _own_pure(release) is not None:
        count = _known(mechanism.loss(1, 1 / mechanism.count_radius(release.choice_epsilon)))
        elsewhere = Together(((_known(mechanism.loss(release.n, 1)), 2), (count, 2)))
        return [Either((_known(mechanism.loss(release.n, 2)), elsewhere))]
    found = [_known(mechanism.loss(release.n, DISTANCE[release.kind]))]
    if release.chooses and release.kind not in (Kind.SITE, Kind.SECURE):
        found.append(choice_loss(release))
    return found


def choice_loss(release: Release) -> RandomisedResponse:
    """Return the privacy loss of a hidden choice; among a number not on record, of one between two, which reveals
    most."""
    return RandomisedResponse(release.choice_epsilon, release.hypotheses or 2)


def _known(loss: Loss | None) -> Loss:
    assert loss is not None, "a release that has a guarantee"
    return loss


def _counts(release: Release) -> bool:
    """Return whether it is a site's release that counts how many clients chose each of several hypotheses."""
    return release.kind is Kind.SITE and release.chooses


def _mechanism(release: Release) -> Mechanism:
    return load(release.mechanism)(release.noise_multiplier)


def _own_pure(release: Release) -> Fraction | None:
    """Return the pure epsilon of a release without its choice; None where its mechanism has none."""
    return _mechanism(release).pure(release.n, DISTANCE[release.kind])


@lru_cache(maxsize=4096)
def composed(releases: frozenset[tuple[Release, int]], delta: float) -> float:
    """Return the epsilon at `delta` of releases that have a guarantee; infinite where their losses are out of range."""
    times: dict[Loss, int] = {}
    try:
        for release, often in releases:
            for loss in losses(release):
                times[loss] = times.get(loss, 0) + often
        return compose(times, delta)
    except NO_GRID:  # the pure epsilon is a bound
        return math.inf


def as_float(cost: Fraction | float) -> float:
    """Return a cost as a float; infinite beyond the largest."""
    try:
        return float(cost)
    except OverflowError:
        return math.inf


def in_words(found: Guarantee | None) -> tuple[str, str]:
    """Return the pure epsilon and the epsilon at delta as text: "none" if there is none."""
    return ("none", "none") if found is None else (amount(found.pure), amount(found.epsilon))


def stated(found: Guarantee) -> str:
    """Return the one number by which a guarantee is stated: its pure epsilon, or that at its delta if less."""
    if math.isinf(found.epsilon):
        return f"no epsilon at delta {found.delta:g}"
    return (
        f"pure epsilon {amount(found.pure)}"
        if found.is_pure
        else f"epsilon {amount(found.epsilon)} at delta {found.delta:g}"
    )


def amount(epsilon: Fraction | float) -> str:
    """Return an epsilon with four digits, or "none" if it is infinite."""
    value = as_float(epsilon)
    return "none" if math.isinf(value) else f"{value:.4g}"
