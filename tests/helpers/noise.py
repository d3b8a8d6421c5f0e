"""The paper's mechanism in one call, as tests ask for it, and a source of no noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

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
