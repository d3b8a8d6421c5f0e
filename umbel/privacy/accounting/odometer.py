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

A loss of at most epsilon, except with probability delta, is (epsilon, delta)-differential privacy. A site that lets no
release exceed its budget by this figure has a privacy filter (Rogers, Roth, Ullman and Vadhan 2016): the figure when it
stops is within the budget, whenever that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from scipy import special

from umbel.privacy.accounting.accountant import NO_GRID
from umbel.privacy.accounting.guarantee import as_float, gap, losses, pure_spent
from umbel.privacy.mechanisms.base import Loss, Matrix
from umbel.privacy.mechanisms.discrete_gaussian import ConcentratedLoss
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.privacy.mechanisms.sampled_gaussian import SampledGaussianLoss
from umbel.protocol.release import Release

ORDERS = 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 512
"""The orders, fixed in advance. Each takes its share of delta, so there are few."""

_POINTS = 2000  # at which delta is computed
_FAR = 12.0  # deviations above the mean, up to which points are close


@dataclass(frozen=True)
class Curve:
    """Renyi divergences of one release at all `ORDERS`."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, losses: Mapping[Loss, int]) -> Curve:
        """Return the divergences of losses together, with their numbers."""
        total = np.zeros(len(ORDERS))
        for loss, count in losses.items():
            total += count * np.array(_divergences(loss))
        return cls(tuple(total.tolist()))


def to_date(curves: Iterable[tuple[Curve, int]], pure: Fraction | float, delta: float) -> float:
    """Return the epsilon of releases to date, given the curve and the number of each sort, and their pure sum.

    Sorts may have the same curve: each counts.
    """
    least, curves = as_float(pure), list(curves)
    if not (curves and delta > 0):
        return least
    total = sum((times * np.array(curve.values) for curve, times in curves), np.zeros(len(ORDERS)))
    return min(least, float(np.min(total + math.log(len(ORDERS) / delta) / (np.array(ORDERS) - 1))))


def clients_to_date(releases: Mapping[Release, int], delta: float) -> float:
    """Return the epsilon that a client has spent, for any sequence of releases at any time; infinite without a
    bound."""
    some = {release: times for release, times in releases.items() if times}
    if any(gap(release) for release in some):
        return math.inf
    return to_date(((_of_client(release), times) for release, times in some.items()), pure_spent(some), delta)


@lru_cache(maxsize=1024)
def _of_client(release: Release) -> Curve:
    return Curve.of(dict.fromkeys(losses(release), 1))


@lru_cache(maxsize=1024)
def _divergences(loss: Loss) -> tuple[float, ...]:
    """Return a bound on the Renyi divergences of a loss at all orders, in both directions."""
    orders = np.array(ORDERS, np.float64)
    match loss:
        case GaussianLoss():
            found = orders * (loss.mu * loss.mu / 2)
        case ConcentratedLoss():
            found = orders * loss.rho
        case SampledGaussianLoss():
            found = np.array([_sampled(loss, order) for order in ORDERS])
        case _:
            found = _of_profile(loss, orders)
    return tuple(np.maximum(found, 0.0).tolist())


def _sampled(loss: SampledGaussianLoss, order: int) -> float:
    """Return the divergence of an integer order of the mixture from the normal, which is the larger direction.

    See Mironov, Talwar and Zhang (2019), Theorem 5 and Section 3.3: a binomial sum.
    """
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
