r"""The epsilon spent to date, for releases without a plan: it holds at all times at once.

A server may choose each release after seeing the earlier ones, and people may read the figure at any moment, and act on
it. Numerical composition is proven only for releases that are fixed in advance. This odometer is proven for all of
them.

Let L be the sum of the privacy losses of all releases so far, and R(a) the sum of their Renyi divergences of order a.
Each divergence is a bound given the past. So exp((a - 1) (L - R(a))) is a supermartingale that starts at 1 (Feldman and
Zrnic 2021, Section 3). So is the mean of these over m orders that are fixed in advance. By Ville's inequality it never
reaches 1/delta, except with probability delta (Whitehouse, Ramdas, Rogers and Wu 2023, "Fully adaptive composition in
differential privacy", whose odometers rest on the same inequality). Each of its m terms is then below m/delta:

    L <= R(a) + log(m / delta) / (a - 1)    for all m orders, at all times at once.

A loss of at most epsilon, except with probability delta, is (epsilon, delta)-differential privacy.

A site that stops in time has a privacy filter (Rogers, Roth, Ullman and Vadhan 2016), which needs less: only the budget
B has to hold, and the site knows B before the first charge. For each loss (1 - exp(B - L))+ is at most

    exp((a - 1) (L - B)) (1 - 1/a)^(a - 1) / a

(Canonne, Kamath and Steinke 2020, Proposition 7). The supermartingale bounds its mean: releases with

    R(a) + log(1 / delta) / (a - 1) + log(1 - 1/a) - log(a) / (a - 1) <= B

are (B, delta)-differentially private together, however the server chose them. A filter may try several orders, each
with its fixed share of delta, and accept what one of them accepts: R(a) only rises, so an order that has refused never
accepts again, and the means of the orders add up to delta at most. Orders and shares follow from B and delta alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from umbel.privacy.accounting.accountant import NO_GRID
from umbel.privacy.accounting.guarantee import as_float, gap, losses, made, pure_spent
from umbel.privacy.mechanisms.base import Loss, Matrix
from umbel.privacy.mechanisms.discrete_gaussian import ConcentratedLoss
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.privacy.mechanisms.sampled_gaussian import SampledGaussianLoss
from umbel.protocol.release import Release

ORDERS = 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 512
"""The orders, fixed in advance. Each takes its share of delta, so there are few."""

_PARTS = ((1.0, 0.5), (0.7, 0.25), (0.45, 0.25))
"""The orders of a filter, relative to the one that accepts most normal noise, and their shares of delta. Rarely drawn
rows lose much at once, which smaller orders count better."""
_HIGHEST = 4096  # order of a filter
_POINTS = 2000  # at which delta is computed
_FAR = 12.0  # deviations above the mean, up to which points are close


Curve = tuple[float, ...]
"""Renyi divergences of one release at all `ORDERS`."""


def curve_of(losses: Mapping[Loss, int]) -> Curve:
    """Return the divergences of losses together, with their numbers."""
    return tuple(_together(losses, ORDERS).tolist())


def to_date(curves: Iterable[tuple[Curve, int]], pure: Fraction | float, delta: float) -> float:
    """Return the epsilon of releases to date, given the curve and the number of each sort, and their pure sum.

    Sorts may have the same curve: each counts.
    """
    least, curves = as_float(pure), list(curves)
    if not (curves and delta > 0):
        return least
    parts = ([times * part for part in curve] for curve, times in curves)
    total = np.array([math.fsum(of_order) for of_order in zip(*parts, strict=True)])
    return min(least, float(np.min(total + math.log(len(ORDERS) / delta) / (np.array(ORDERS) - 1))))


def within(losses: Mapping[Loss, int], budget: Fraction, delta: float) -> bool:
    """Return whether losses, with their numbers, are within the filter of a budget at `delta`, which is above 0."""
    orders = _orders_within(as_float(budget), delta)
    divergences = _together(losses, tuple(order for order, _ in orders))
    return any(
        math.isfinite(spent) and spent + _converted(order, delta * share) <= budget
        for spent, (order, share) in zip(divergences.tolist(), orders, strict=True)
    )


@lru_cache(maxsize=64)
def _orders_within(budget: float, delta: float) -> tuple[tuple[int, float], ...]:
    """Return the orders of a filter with their shares of delta, which depend on the budget and delta alone."""
    every = np.arange(2, _HIGHEST + 1)
    most_noise = int(every[np.argmax((budget - _converted(every, delta)) / every)])
    shares: dict[int, float] = {}
    for part, share in _PARTS:
        order = max(2, round(part * most_noise))
        shares[order] = shares.get(order, 0.0) + share
    return tuple(shares.items())


def _converted(order: Any, delta: float) -> Any:
    """Return how far the epsilon of a filter lies above the divergence of an order."""
    return (math.log(1 / delta) - np.log(order)) / (order - 1) + np.log1p(-1 / order)


def clients_to_date(releases: Mapping[Release, int], delta: float) -> float:
    """Return the epsilon that a client has spent, for any sequence of releases at any time; infinite without a
    bound."""
    if (some := made(releases, gap)) is None:
        return math.inf
    return to_date(((_of_client(release), times) for release, times in some.items()), pure_spent(some), delta)


@lru_cache(maxsize=1024)
def _of_client(release: Release) -> Curve:
    return curve_of(dict.fromkeys(losses(release), 1))


def _together(losses: Mapping[Loss, int], orders: tuple[int, ...]) -> Matrix:
    """Return a bound on the Renyi divergences of losses together, with their numbers."""
    parts = [[count * part for part in _divergences(loss, orders)] for loss, count in losses.items()]
    return np.array([math.fsum(of_order) for of_order in zip(*parts, strict=True)] or np.zeros(len(orders)))


@lru_cache(maxsize=1024)
def _divergences(loss: Loss, whole: tuple[int, ...]) -> tuple[float, ...]:
    """Return a bound on the Renyi divergences of a loss at whole orders, in both directions."""
    orders = np.array(whole, np.float64)
    match loss:
        case GaussianLoss():
            found = orders * (loss.mu * loss.mu / 2)
        case ConcentratedLoss():
            found = orders * loss.rho
        case SampledGaussianLoss():
            found = np.array([_sampled(loss, order) for order in whole])
        case _:
            found = _of_profile(loss, orders)
    return tuple(np.maximum(found, 0.0).tolist())


def _sampled(loss: SampledGaussianLoss, order: int) -> float:
    """Return the divergence of an integer order of the mixture from the normal, which is the larger direction.

    See Mironov, Talwar and Zhang (2019), Theorem 5 and Section 3.3: a binomial sum.
    """
    from scipy import special  # the import takes a moment

    k = np.arange(order + 1, dtype=np.float64)
    binomial = special.gammaln(order + 1) - special.gammaln(k + 1) - special.gammaln(order - k + 1)
    weights = k * math.log(loss.rate) + (order - k) * math.log1p(-loss.rate)
    terms = binomial + weights + k * (k - 1) / (2 * loss.noise_multiplier**2)
    return float(special.logsumexp(terms)) / (order - 1)


def _of_profile(loss: Loss, orders: Matrix) -> Matrix:
    """Return the divergences of a symmetric loss with a largest value, from its delta at each epsilon.

    exp((a - 1) R(a)) = 1 + a (a - 1) times the integral of (exp((a - 1) e) + exp(-a e)) delta(e) over e >= 0. Delta
    falls, so its value at the left of each step bounds the step. Pure epsilons have divergences of at most epsilon, and
    a epsilon^2 / 2 (Bun and Steinke 2016, Proposition 3.3).
    """
    from scipy import special  # the import takes a moment

    largest = loss.largest
    if math.isinf(largest):
        return np.full(len(orders), math.inf)
    square = largest * largest
    bound = np.minimum(largest, orders * (square / 2))
    if not 0 < square < math.inf:
        return bound
    near = min(largest, loss.mean + _FAR * loss.deviation)
    points = np.linspace(0.0, near, _POINTS)
    if near < largest:
        points = np.concatenate([points, np.linspace(near, largest, _POINTS)[1:]])
    left, width = points[:-1], np.diff(points)
    try:
        profile = loss.delta(left)
    except NO_GRID:
        return bound
    with np.errstate(divide="ignore"):
        deltas = np.log(np.clip(profile + 1e-12, 0.0, 1.0))
    found = []
    for a in orders.tolist():
        rising = (a - 1) * left + _log_expm1((a - 1) * width) - math.log(a - 1)
        falling = -a * left + np.log(-np.expm1(-a * width)) - math.log(a)
        terms = deltas + np.logaddexp(rising, falling)
        found.append(float(np.logaddexp(0.0, math.log(a * (a - 1)) + special.logsumexp(terms))) / (a - 1))
    least: Matrix = np.minimum(bound, np.array(found))
    return least


def _log_expm1(values: Matrix) -> Matrix:
    """Return log(exp(x) - 1) for x > 0, without overflow."""
    found: Matrix = values + np.log(-np.expm1(-values))
    return found
