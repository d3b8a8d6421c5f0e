"""The paper's mechanism in one call, as tests ask for it, and a source of no noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from umbel.privacy.mechanisms import Laplace
from umbel.privacy.mechanisms import sanitise as release
from umbel.privacy.mechanisms.base import Matrix, NoiseSource
from umbel.privacy.mechanisms.randomness import RowSource
from umbel.protocol.release import Clipping


def sanitise(
    updates: Matrix,
    noise_multiplier: float,
    radius: float,
    mode: Clipping,
    sources: Iterable[NoiseSource],
    parts: Sequence[slice] | None = None,
) -> Matrix:
    """Return updates with vector Laplace noise; none where nu is 0."""
    mechanism = None if noise_multiplier == 0 else Laplace(noise_multiplier)
    return release.sanitise(mechanism, updates, radius, mode, sources, parts)


def sample(n: int, epsilon: float, generator: NoiseSource) -> Matrix:
    """Return one noise vector of density proportional to exp(-epsilon |x|) in R^n."""
    noise: Matrix = Laplace(n / epsilon).noise([n], np.ones((1, 1)), iter([generator]))[0]
    return noise


def rounding(n: int, noise_multiplier: float, radius: float) -> float:
    """Return the deviation of a component of that noise, by which releases are rounded."""
    return Laplace(noise_multiplier).deviation(n) * radius


def violations(first: Matrix, second: Matrix, epsilon: float, bins: int) -> tuple[int, int]:
    """Return how many cells have more than e^epsilon times as much of one world at five sigma, and of how many.

    Of a cell's draws, those of one world are at most binomial with p = e^epsilon / (1 + e^epsilon).
    """
    both = np.concatenate([first, second])
    edges = [np.quantile(column, np.linspace(0, 1, bins + 1)[1:-1]) for column in both.T]
    places = [
        np.stack([np.searchsorted(edge, column) for edge, column in zip(edges, one.T, strict=True)])
        for one in (first, second)
    ]
    shape = (bins,) * both.shape[1]
    a, b = (np.bincount(np.ravel_multi_index(tuple(place), shape), minlength=bins ** len(shape)) for place in places)
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    worse = np.minimum(stats.binom.sf(a - 1, a + b, p), stats.binom.sf(b - 1, a + b, p))
    return int((worse < stats.norm.sf(5)).sum()), len(a)


def proved(a: Matrix, b: Matrix, thresholds: Matrix) -> Matrix:
    """Return the epsilon that being above each threshold proves, of draws from two inputs, wrongly once in a million.

    Clopper-Pearson bounds on two probabilities bound their ratio.
    """
    above = [len(values) - np.searchsorted(np.sort(values), thresholds, side="right") for values in (a, b)]
    low = stats.beta.ppf(1e-6 / 2, above[0], len(a) - above[0] + 1)
    high = stats.beta.ppf(1 - 1e-6 / 2, above[1] + 1, len(b) - above[1])
    bound: Matrix = np.log(low / high)
    return bound


class NoNoise:
    """A source that draws nothing but zeros: every row is drawn, and no noise."""

    def bytes(self, length: int) -> bytes:
        return bytes(length)

    def random(self, size: int) -> NDArray[np.float64]:
        return np.zeros(size)

    def standard_normal(self, size: int) -> NDArray[np.float64]:
        return np.zeros(size)

    def standard_gamma(self, shape: float) -> float:
        return 0.0


SILENT = RowSource(NoNoise(), NoNoise())
