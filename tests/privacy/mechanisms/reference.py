"""Bounds on privacy losses by other mathematics than the implementation's.

The implementation integrates a density of the vector Laplace loss in spheroidal coordinates and composes
hockey sticks by dp_accounting. Here the noise's norm is drawn up by quantiles, the loss given the norm follows
from the angle, losses are rounded down to a grid, and what lies below the grid is left out. So what composes from
it is a lower bound, up to the 1e-9 or so of the quadrature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

Vector = NDArray[np.float64]
Masses = tuple[float, int, Vector]
"""Interval of a grid, multiple of it that the first loss is, and probability of each loss."""


def laplace_cdf(n: int, shift: float, losses: Vector) -> Vector:
    """P(L <= l) for L = |x - s e| - |x| and -s <= l < s, x of density proportional to exp(-|x|).

    Given the norm rho, which is Gamma(n, 1), L <= l holds when the cosine between x and e is at least
    c = (rho^2 + s^2 - (rho + l)^2)/(2 rho s), which no cosine is for rho below (s - l)/2; the square of the
    cosine is Beta(1/2, (n-1)/2).
    """
    if n == 1:
        inside = np.where(losses < -shift, 0.0, 0.5 * np.exp((losses - shift) / 2))
        return np.where(losses >= shift, 1.0, inside)
    losses = np.maximum(losses, -shift)
    least = (shift - losses) / 2
    low, high = special.gammaincinv(n, 1e-17), special.gammainccinv(n, 1e-17)
    # The integrand starts like a square root at `least`; in t, with rho = least + t^2, it is smooth.
    begin, end = (np.sqrt(np.maximum(bound - least, 0)) for bound in (low, high))
    nodes, weights = np.polynomial.legendre.leggauss(160)
    t = begin + (end - begin) * (nodes[:, None] + 1) / 2
    rho = least + t**2
    # Relative to the mode: the constant loses nine digits for a million components.
    log_density = (n - 1) * np.log(rho / max(n - 1, 1)) - rho + (n - 1)
    constant = (n - 1) * math.log(max(n - 1, 1)) - (n - 1) - special.gammaln(n)
    if n > 100:
        # Stirling's series for the same, to 1e-16.
        m = n - 1
        constant = -0.5 * math.log(2 * math.pi * m) - 1 / (12 * m) + 1 / (360 * m**3)
    density = np.exp(log_density + constant) * 2 * t
    cosine = np.clip((shift**2 - losses**2 - 2 * rho * losses) / (2 * rho * shift), -1, 1)
    upper = 0.5 * special.betainc((n - 1) / 2, 0.5, 1 - cosine**2)
    chance = np.where(cosine >= 0, upper, 1 - upper)
    return (weights[:, None] * density * chance).sum(0) * (end - begin) / 2


def laplace_delta(n: int, shift: float, epsilons: Vector) -> Vector:
    """P(L > epsilon) - exp(epsilon) Q(L > epsilon), which is P(L < -epsilon)."""
    return 1 - laplace_cdf(n, shift, epsilons) - np.exp(epsilons) * laplace_cdf(n, shift, -epsilons)


def rounded_down(cdf: Callable[[Vector], Vector], low: float, high: float, interval: float) -> Masses:
    """Return the losses from `low` on, each moved down to a multiple of `interval`; all above `high` to there."""
    first, last = math.floor(low / interval), math.floor(high / interval * (1 + 1e-12))
    grid = np.arange(first, last + 1) * interval
    # A loss that is a multiple but for rounding stays where it is.
    chances = np.append(cdf(grid - 1e-12 * interval), 1.0)
    return interval, first, np.maximum(np.diff(chances), 0.0)


def add(parts: Iterable[tuple[Masses, int]]) -> Masses:
    """Return the sum of independent losses on one grid, each so many times, by Fourier transform without wrapping."""
    parts = list(parts)
    length = 1 + sum((len(masses) - 1) * times for (_, _, masses), times in parts)
    size = 2 * (length // 2 + 1)
    transform = np.ones(size // 2 + 1, complex)
    for (_, _, masses), times in parts:
        transform *= np.fft.rfft(masses, size) ** times
    return (
        parts[0][0][0],
        sum(first * times for (_, first, _), times in parts),
        np.maximum(np.fft.irfft(transform, size)[:length] - 1e-18, 0.0),
    )


def delta_of(sums: Masses, epsilon: float) -> float:
    interval, first, masses = sums
    losses = (first + np.arange(len(masses))) * interval
    return float((masses * -np.expm1(np.minimum(epsilon - losses, 0.0))).sum())


def epsilon_of(delta_at: Callable[[float], float], delta: float, high: float) -> float:
    """Return the epsilon in [0, high] at which delta_at falls to `delta`."""
    if delta_at(0.0) <= delta:
        return 0.0
    return float(optimize.brentq(lambda epsilon: delta_at(epsilon) - delta, 0.0, high, xtol=1e-10 * high))
