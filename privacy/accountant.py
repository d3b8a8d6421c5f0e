"""What participations cost together: two guarantees that must not be mixed up.

*Heuristic*: radius ``update``, the paper's n/nu within the norm of the client's own update
(Sec. 4.1.3). The noise then depends on what it hides, so this bounds nothing between updates
of different norm.

*Formal*: radius ``public``. Two updates at distance d give densities within exp(eps d) of each
other, with eps = n/(nu r) for a public radius r. Between updates one radius apart that is pure
n/nu a participation, and participations add up; under (eps, delta) the same mechanism costs far
less, which is computed here from its privacy-loss distribution.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray
from scipy import special

from protocol.release import Release

# Chance left out at either end of the norm of the noise; counted as an infinite privacy loss.
_TAIL = 1e-16
# Quadrature nodes, and grid points of the privacy loss on either side of zero.
_NODES = 400
_GRID = 2000
_MAX_GRID = 100_000


@dataclass(frozen=True)
class Guarantee:
    """What is claimed for a client, between updates one radius apart.

    Attributes
    ----------
    pure : float
        Epsilon at delta = 0: the sum over participations.
    epsilon, delta : float
        The smaller of the numerical epsilon at `delta` and the pure one.
    """

    pure: float
    epsilon: float
    delta: float


def formal(releases: Mapping[Release, int], delta: float, distance: float = 1.0) -> Guarantee:
    """Return the formal guarantee of releases with radius ``public``.

    Parameters
    ----------
    releases : mapping from Release to int
        How often the client released each; all with a public radius.
    delta : float
        Between 0 and 1.
    distance : float
        Distance between the two updates, in radii. All clipped updates lie within 2.

    Raises
    ------
    ValueError
        When a release is without noise, or within the norm of the update: then nothing is guaranteed.
    """
    if any(not release.formal for release in releases):
        raise ValueError("a release without noise, or without a public radius, has no guarantee")
    times: dict[tuple[int, float], int] = defaultdict(int)  # n and nu, on which the loss depends
    for release, often in releases.items():
        times[release.n, release.noise_multiplier] += often
    shifts = {(n, nu): distance * n / nu for (n, nu), often in times.items() if often}
    if not shifts:
        return Guarantee(0.0, 0.0, delta)
    pure = sum(shift * times[which] for which, shift in shifts.items())
    # One grid for all, since only distributions on one grid compose.
    interval = max(min(shifts.values()) / _GRID, max(shifts.values()) / _MAX_GRID)
    composed: PrivacyLossDistribution | None = None
    for (n, nu), shift in shifts.items():
        part = _distribution(n, shift, interval).self_compose(times[n, nu])
        composed = part if composed is None else composed.compose(part)
    assert composed is not None
    return Guarantee(pure, min(pure, float(composed.get_epsilon_for_delta(delta))), delta)


def loss_cdf(n: int, shift: float, losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return P(L <= l) for the privacy loss L of one release.

    With noise x of density proportional to exp(-|x|) in R^n and two centres a distance `shift`
    apart, L = |x - shift e| - |x|. Given the norm |x| = rho, which is Gamma(n, 1), L <= l holds
    when the cosine between x and e is at least c = (rho^2 + shift^2 - (rho + l)^2)/(2 rho shift),
    which no cosine is for rho below (shift - l)/2; the square of the cosine is
    Beta(1/2, (n-1)/2). The norm is integrated by Gauss-Legendre quadrature.

    Parameters
    ----------
    n : int
    shift : float
        n/nu times the distance in radii.
    losses : ndarray, shape (m,)
        Between -shift and shift.

    Returns
    -------
    ndarray, shape (m,)
    """
    if n == 1:
        # The Laplace mechanism on the line: L is shift minus twice the way from the first centre.
        return np.where(losses >= shift, 1.0, 0.5 * np.exp((losses - shift) / 2))
    # The integrand starts like a square root at `least`; in t, with rho = least + t^2, it is smooth.
    least = (shift - losses) / 2
    low, high = special.gammaincinv(n, _TAIL), special.gammainccinv(n, _TAIL)
    begin, end = (np.sqrt(np.maximum(bound - least, 0)) for bound in (low, high))
    nodes, weights = _quadrature()
    t = begin + (end - begin) * (nodes[:, None] + 1) / 2
    rho = least + t**2
    density = np.exp((n - 1) * np.log(rho) - rho - special.gammaln(n)) * 2 * t
    cosine = np.clip((rho**2 + shift**2 - (rho + losses) ** 2) / (2 * rho * shift), -1, 1)
    # The regularised incomplete beta function of 1 - c^2 keeps its digits near +-1.
    upper = 0.5 * special.betainc((n - 1) / 2, 0.5, 1 - cosine**2)
    chance = np.where(cosine >= 0, upper, 1 - upper)
    cdf: NDArray[np.float64] = (weights[:, None] * density * chance).sum(0) * (end - begin) / 2
    return cdf


@cache
def _quadrature() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return nodes and weights of Gauss-Legendre quadrature on (-1, 1), which take longer than to use them."""
    return np.polynomial.legendre.leggauss(_NODES)


@lru_cache(maxsize=32)
def _distribution(n: int, shift: float, interval: float) -> PrivacyLossDistribution:
    """Return the privacy-loss distribution of one release, every loss rounded up to a grid.

    The mechanism is symmetric, so adding and removing are the same.
    """
    top = math.ceil(shift / interval)
    grid = np.arange(-top, top + 1) * interval
    cdf = np.maximum.accumulate(loss_cdf(n, shift, np.clip(grid, -shift, shift)))
    # What the quadrature misses, or finds too much, counts as an infinite loss.
    missed = 2 * _TAIL + abs(1 - cdf[-1])
    cdf = np.minimum(cdf, 1.0)
    cdf[-1] = 1.0
    mass = np.diff(cdf, prepend=0.0)
    probabilities = {index - top: float(p) for index, p in enumerate(mass) if p > 0}
    return PrivacyLossDistribution.create_from_rounded_probability(probabilities, missed, interval)
