"""What releases cost together, from the laws of their privacy losses.

Losses of independent releases add up, also where each was chosen with the earlier ones in view. The
law of the sum is computed on a grid, each loss being moved to the grid by the pessimistic
connect-the-dots of Doroshenko et al. (2022): delta(epsilon) of the moved loss is that of the loss at
grid points and above it in between, so what comes out is an upper bound, and its excess fades with the
square of the grid's interval. Composition is that of Google's dp_accounting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING

import numpy as np

from umbel.privacy.mechanisms.base import Loss, Matrix, of_any_sign
from umbel.privacy.mechanisms.discrete_gaussian import ConcentratedLoss
from umbel.privacy.mechanisms.gaussian import GaussianLoss

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

# The share of epsilon that each of two effects of the grid may add: on the mean and on the deviation.
_SHARE = 2.5e-4
# Losses are cut above where delta is this share of the delta asked for, all participations together,
_CUT = 1e-4
# that of one loss among several that are one release, which does not know delta, above this,
_NEVER = 1e-25
# and below this many deviations under the mean: there they are moved up.
_BELOW = 14.0
# A delta may be wrong in the digit after these, and is raised by so much.
_SLACK = 1e-9
# What a participation adds to the rounding of a composition, in probability; dp_accounting's is of that order.
_ROUNDING = 1e-15
# Largest losses out of these bounds are added up as they are: they are no guarantee, or nothing.
_TINY, _HUGE = 1e-12, 1e9
# Points of a grid; more than this only losses need that are nearly always tiny and now and then large.
_MAX_GRID = 20_000
# So many losses add up to nearly a normal one.
_MANY = 100


def compose(losses: Mapping[Loss, int], delta: float) -> float:
    """Return the epsilon at `delta` of so many releases of each loss together.

    An upper bound, for up to 10,000 releases within 0.5 % of the truth; never above the sum of the largest losses.

    Parameters
    ----------
    losses : mapping from Loss to int
        How often a release of each loss was made.
    delta : float
        At least 0 and below 1. At 0 the sum of the largest losses, infinite with a Gaussian one.

    Raises
    ------
    ValueError
        When a count is negative or `delta` is not such a number.
    """
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be at least 0 and below 1, got {delta}")
    if any(count < 0 for count in losses.values()):
        raise ValueError("a release cannot have been made less than no times")
    return _compose(tuple((loss, count) for loss, count in losses.items() if count), delta)


@lru_cache(maxsize=1024)
def _compose(losses: tuple[tuple[Loss, int], ...], delta: float) -> float:
    pure = sum(count * loss.largest for loss, count in losses)
    if delta == 0 or pure == 0:
        return pure
    kinds: dict[Loss, int] = {}
    apart = 0.0
    gaussian = math.hypot(*(math.sqrt(count) * loss.mu for loss, count in losses if isinstance(loss, GaussianLoss)))
    rho = sum(count * loss.rho for loss, count in losses if isinstance(loss, ConcentratedLoss))
    if max(gaussian, rho) > _HUGE:
        return pure
    if gaussian:
        kinds[GaussianLoss(gaussian)] = 1
    if rho:
        kinds[ConcentratedLoss(rho)] = 1
    for loss, count in losses:
        if isinstance(loss, GaussianLoss | ConcentratedLoss):
            continue
        if _TINY < loss.largest <= _HUGE or math.isinf(loss.largest):
            kinds[loss] = count
        else:
            apart += count * loss.largest
    if not kinds:
        return pure
    if list(kinds.values()) == [1]:
        (one,) = kinds
        start = one.mean + one.deviation
        return min(pure, apart + _epsilon(lambda epsilon: float(one.delta(np.array([epsilon]))[0]), delta, start))
    releases = sum(kinds.values())
    target = delta * (1 - 1e-6) - _ROUNDING * releases
    if target <= 0:
        return pure
    composed = _together(kinds, _CUT * delta / releases)
    start = sum(count * loss.mean for loss, count in kinds.items())
    return min(pure, apart + _epsilon(composed.get_delta_for_epsilon, target, start))


def _together(kinds: Mapping[Loss, int], cut: float) -> PrivacyLossDistribution:
    """Return the law of the sum of so many of each loss, on a grid; losses of delta below `cut` count as infinite."""
    supports = {loss: _support(loss, cut) for loss in kinds}
    interval = max(_interval(kinds), max(high - low for low, high in supports.values()) / _MAX_GRID)
    parts = [_distribution(loss, *supports[loss], interval).self_compose(count) for loss, count in kinds.items()]
    return reduce(lambda one, other: one.compose(other), parts)


@dataclass(frozen=True)
class Together(Loss):
    """The loss of several independent releases as if they were one; `delta` is an upper bound.

    Attributes
    ----------
    parts : tuple of (Loss, int)
        How often each loss is in it.
    """

    parts: tuple[tuple[Loss, int], ...]

    @property
    def mean(self) -> float:
        return sum(count * loss.mean for loss, count in self.parts)

    @property
    def deviation(self) -> float:
        return math.hypot(*(math.sqrt(count) * loss.deviation for loss, count in self.parts))

    @property
    def largest(self) -> float:
        return sum(count * loss.largest for loss, count in self.parts)

    def delta(self, epsilons: Matrix) -> Matrix:
        epsilons = np.asarray(epsilons, np.float64)
        size = np.abs(epsilons)
        order = np.argsort(size)
        positive = np.empty_like(size)
        positive[order] = _law(self.parts).get_delta_for_epsilon(size[order])
        return of_any_sign(epsilons, np.where(size < self.largest, np.minimum(positive + _ROUNDING, 1.0), 0.0))


@lru_cache(maxsize=64)
def _law(parts: tuple[tuple[Loss, int], ...]) -> PrivacyLossDistribution:
    return _together(dict(parts), _NEVER)


@dataclass(frozen=True)
class Either(Loss):
    """The loss of a release that is one of several unknown cases: the largest delta at each epsilon.

    The maximum of privacy profiles is one: it is convex in exp(epsilon), falls, and is at least (1 - exp(epsilon))+
    (Zhu, Dong and Wang 2022). So it composes like any other.

    Attributes
    ----------
    cases : tuple of Loss
    """

    cases: tuple[Loss, ...]

    @property
    def mean(self) -> float:
        return max(loss.mean for loss in self.cases)

    @property
    def deviation(self) -> float:
        return max(loss.deviation for loss in self.cases)

    @property
    def largest(self) -> float:
        return max(loss.largest for loss in self.cases)

    def delta(self, epsilons: Matrix) -> Matrix:
        delta: Matrix = np.max([loss.delta(epsilons) for loss in self.cases], axis=0)
        return delta


def _epsilon(delta_at: Callable[[float], float], delta: float, start: float) -> float:
    """Return the least epsilon >= 0 with delta_at(epsilon) <= delta, or slightly more; `start` is a guess at it."""
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, max(start, _TINY)
    while not delta_at(high) <= delta:
        low, high = high, 2 * high
        if high > 1e300:
            return math.inf
    from scipy.optimize import brentq  # it takes a third of a second

    tolerance = 1e-9 * high
    root = brentq(lambda epsilon: delta_at(epsilon) - delta, low, high, xtol=tolerance, rtol=1e-12)
    return float(root + 2 * tolerance)


def _interval(kinds: Mapping[Loss, int]) -> float:
    """Return the grid interval h that keeps the excess of epsilon within its share.

    A loss moved to the grid gains at most h^2/4 of variance and h^2/8 of mean, and no more than h.
    """
    releases = sum(kinds.values())
    mean = sum(count * loss.mean for loss, count in kinds.items())
    variance = sum(count * loss.deviation * loss.deviation for loss, count in kinds.items())
    deviation = math.sqrt(variance)
    pure = sum(count * loss.largest for loss, count in kinds.items())
    # Epsilon itself, as a normal sum would have it.
    share = _SHARE * min(mean + 2 * deviation, pure)
    by_mean = max(math.sqrt(8 * share / releases), share / releases)
    by_deviation = 2 * math.sqrt((share + 2 * deviation) * share / releases)
    # A few releases have not become a normal sum: epsilon may be where a density of losses ends.
    interval = min(by_mean, by_deviation) * min(1.0, max(0.2, math.sqrt(releases / _MANY)))
    ends = [loss.largest for loss in kinds]
    if len(ends) == 1 and math.isfinite(ends[0]):
        # Losses that are a largest one, or its opposite, with a probability of their own stay where they are.
        interval = ends[0] / math.ceil(ends[0] / interval)
    return interval


def _support(loss: Loss, cut: float) -> tuple[float, float]:
    """Return between what losses `loss` is looked at: above, delta is at most `cut`, and below is little."""
    tops = np.minimum(loss.mean + loss.deviation * np.geomspace(0.5, 1e6, 80), loss.largest)
    top = float(tops[min(int((loss.delta(tops) > cut).sum()), len(tops) - 1)])
    return max(loss.mean - _BELOW * loss.deviation, -top), top


def _distribution(loss: Loss, low: float, high: float, interval: float) -> PrivacyLossDistribution:
    """Return the law of `loss` on multiples of `interval`; losses above `high` count as infinite, by their delta."""
    # It imports half of SciPy, for which a run without a guarantee need not wait.
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    # Not one further for the rounding of a `high` that is a multiple.
    top = math.ceil(high / interval * (1 - 1e-12))
    bottom = max(math.floor(low / interval), -top)
    first = max(bottom, 0)
    deltas = np.minimum(loss.delta(np.arange(first, top + 1, dtype=np.float64) * interval) * (1 + _SLACK), 1.0)
    # Probabilities that keep delta at the grid points; where rounding makes one negative, zero is more.
    falls, step = -np.diff(deltas, append=deltas[-1]), math.exp(-interval)
    narrow = -math.expm1(-interval)
    masses = np.empty_like(deltas)
    masses[1:] = (falls[:-1] - step * falls[1:]) / narrow
    # Symmetry: the probability of -l is exp(-l) of that of l. All of those below `bottom` are moved up to it.
    count = min(-bottom, len(masses) - 1) if bottom < 0 else 0
    mirror = masses[1:] * np.exp(-np.arange(1, len(masses)) * interval) if bottom < 0 else masses[:0]
    masses[0] = 1 - deltas[0] - (2 if bottom < 0 else 1) * falls[0] * step / narrow
    below = mirror[:count][::-1].copy()
    if count:
        below[0] += mirror[count:].sum()
    masses = np.maximum(np.concatenate([below, masses]), 0.0)
    probabilities = dict(zip(range(first - count, top + 1), masses.tolist(), strict=True))
    return PrivacyLossDistribution.create_from_rounded_probability(probabilities, float(deltas[-1]), interval)
