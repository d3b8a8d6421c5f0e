"""The law of a target's noise, tested before it is used, and the privacy that follows from it.

The statistic is Anderson and Darling's (1952) with estimated locations and scale. Its distribution under a law depends
on none of them, so draws from the law give the p-value: the rank among `_DRAWS` draws is an exact test (Barnard,
1963). A test sees the body of a law. It says nothing about tails beyond the number of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from umbel.privacy.accounting.accountant import compose
from umbel.privacy.mechanisms.base import Loss
from umbel.privacy.mechanisms.gaussian import GaussianLoss
from umbel.privacy.mechanisms.laplace_loss import LaplaceLoss

Matrix = NDArray[np.float64]

FIT_LEVEL = 0.01
"""A law is rejected if its p-value is at most this; a right law is rejected as often."""

GAUSSIAN, LAPLACE, VECTOR = "gaussian", "laplace", "vector laplace"
"""The laws. The density of the last depends on the Euclidean norm of all values, as exp(-norm / scale)."""

_VALUES = 500  # of each group that a test uses at most
_DRAWS = 999
_NULL = 211  # purpose of draws
_GROUP = 20  # releases, twice as many for a test of norms
_BETWEEN = 1.3  # of 1, the Gaussian's, and of about 2


def _standardised(groups: Matrix, law: str) -> Matrix:
    """Return groups (..., 2, k) in order (..., 2 k), without the law's estimates of their locations and scale."""
    if law == GAUSSIAN:
        rest = groups - groups.mean(-1, keepdims=True)
        scale = np.sqrt(np.square(rest).mean((-2, -1)))
    else:
        rest = groups - np.median(groups, axis=-1, keepdims=True)
        scale = np.abs(rest).mean((-2, -1))
    found: Matrix = np.sort(rest.reshape(*rest.shape[:-2], -1), axis=-1) / scale[..., None]
    return found


def _statistic(groups: Matrix, law: str) -> Matrix:
    """Return Anderson and Darling's statistic of each pair of groups (..., 2, k)."""
    ordered = _standardised(groups, law)
    below, above = (_log_below(ordered, law), _log_below(-ordered, law))
    n = ordered.shape[-1]
    weights = (2 * np.arange(1, n + 1) - 1) / n
    found: Matrix = -n - (weights * (below + above[..., ::-1])).sum(-1)
    return found


def _log_below(points: Matrix, law: str) -> Matrix:
    """Return the logarithm of the law's distribution function."""
    if law == GAUSSIAN:
        found: Matrix = special.log_ndtr(points)
        return found
    half = math.log(0.5)
    return np.where(points < 0, half + np.minimum(points, 0.0), np.log1p(-0.5 * np.exp(-np.maximum(points, 0.0))))


@lru_cache(maxsize=16)
def _null(law: str, k: int) -> Matrix:
    """Return the statistics of draws from a law."""
    generator, shape = np.random.default_rng([_NULL, k]), (_DRAWS, 2, k)
    return _statistic(generator.standard_normal(shape) if law == GAUSSIAN else generator.laplace(size=shape), law)


def p_value(one: Matrix, other: Matrix, law: str) -> float:
    """Return the p-value of two groups of values under a law of one scale, and any two locations.

    0 if the values of a group are all equal, or there are fewer than eight.
    """
    k = min(len(one), len(other), _VALUES)
    if k < 8 or any(np.ptp(group[:k]) <= 1e-12 * np.abs(group[:k]).max() for group in (one, other)):
        return 0.0
    groups = np.stack([one[:k], other[:k]])
    return float((1 + (_null(law, k) >= _statistic(groups, law)).sum()) / (1 + _DRAWS))


@dataclass(frozen=True)
class Fit:
    """Noise of a tested law, and the distance `apart` between two releases in its scales, from `low` to `high`.

    The scale, from `least` to `greatest`, is the deviation of `GAUSSIAN`, or the mean absolute deviation of `LAPLACE`.
    """

    law: str
    apart: float
    low: float
    high: float
    least: float
    greatest: float

    def epsilon(self, delta: float, rounds: int = 1, apart: float | None = None) -> float:
        """Return the epsilon at `delta` of so many releases; infinite at 0 if the law is Gaussian."""
        return compose({loss(self.law, self.apart if apart is None else apart): rounds}, delta)


def loss(law: str, apart: float, n: int = 1) -> Loss:
    """Return the privacy loss between two releases `apart` scales of a law; `n` values have a vector's noise."""
    return GaussianLoss(apart) if law == GAUSSIAN else LaplaceLoss(n, apart)


def joint(releases: Matrix) -> str:
    """Return the law that passes a test of the norms of noise, in releases (m, n) of one update; "" if none does.

    Kolmogorov and Smirnov's test with an estimated scale rejects a right law less often than at `FIT_LEVEL`. Squared
    norms of a Gaussian vector of n values have a variance of 2/n squared means, and of a Laplace vector about twice
    that. So the variance tells the two apart where a test of few releases does not.
    """
    if len(releases) < 2 * _GROUP:
        return ""
    n = releases.shape[1]
    squares = np.square(releases - releases.mean(axis=0)).sum(axis=1)
    if not squares.mean() > 0:
        return ""
    ratio = n / 2 * squares.var() / squares.mean() ** 2
    if ratio < _BETWEEN:
        return GAUSSIAN if stats.kstest(n * squares / squares.mean(), "chi2", (n,)).pvalue > FIT_LEVEL else ""
    return VECTOR if stats.kstest(np.sqrt(squares) / vector_scale(releases), "gamma", (n,)).pvalue > FIT_LEVEL else ""


def vector_scale(releases: Matrix, level: float = 1.0) -> float:
    """Return the scale of a Laplace vector's noise in releases (m, n) of one update: at a `level` below 1, the least.

    The norms are gamma distributed with shape n.
    """
    m, n = releases.shape
    total = float(np.linalg.norm(releases - releases.mean(axis=0), axis=1).sum())
    return total / (m * n) if level >= 1 else 2 * total / float(stats.chi2.ppf(1 - level / 2, 2 * m * n))


def fit(one: Matrix, other: Matrix, level: float) -> Fit | None:
    """Return the fit to a statistic of releases of one update (m,) and of another (m',), at confidence 1 - `level`.

    None unless just one of the laws passes its test: otherwise nothing may be fitted.
    """
    tested = {law: p_value(one, other, law) for law in (GAUSSIAN, LAPLACE)}
    passed = [law for law, found in tested.items() if found > FIT_LEVEL]
    if len(passed) != 1:
        return None
    law = passed[0]
    middle = np.mean if law == GAUSSIAN else np.median
    distance = abs(float(middle(one) - middle(other)))
    rest = np.concatenate([one - middle(one), other - middle(other)])
    m = len(rest)
    # A quarter of the level for each end of the distance, and of the scale.
    z = float(special.ndtri(1 - level / 4))
    if law == GAUSSIAN:
        scale = float(np.sqrt(np.square(rest).sum() / (m - 2)))
        least, greatest = (scale * math.sqrt((m - 2) / stats.chi2.ppf(q, m - 2)) for q in (1 - level / 4, level / 4))
    else:
        # 2 sum |x| / b is nearly chi square with 2 m degrees.
        scale = float(np.abs(rest).mean())
        least, greatest = (scale * 2 * m / stats.chi2.ppf(q, 2 * m) for q in (1 - level / 4, level / 4))
    # The deviation of a Gaussian's mean, and nearly that of a Laplace law's median, is the scale over the root.
    error = z * scale * math.sqrt(1 / len(one) + 1 / len(other))
    low, high = max(0.0, distance - error) / greatest, (distance + error) / least
    return Fit(law, distance / scale, float(low), float(high), float(least), float(greatest))
