"""The paper's mechanism in one call, as tests ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from umbel.privacy.mechanisms import Laplace
from umbel.privacy.mechanisms import sanitise as release
from umbel.privacy.mechanisms.base import Matrix, NoiseSource
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
