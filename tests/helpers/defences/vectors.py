"""A target with umbel's Laplace noise, which depends on the norm of all values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.helpers.defences.right import Matrix, entropy
from umbel.privacy.mechanisms import Laplace
from umbel.privacy.mechanisms.base import clip

EPSILON, NOISE_MULTIPLIER = 2.0, 8.0


def noisy() -> Callable[[Matrix], Matrix]:
    """Return a function of one flat array."""

    def release(update: Matrix) -> Matrix:
        clipped = clip(np.asarray(update, np.float64)[None], 1.0)
        noise = Laplace(NOISE_MULTIPLIER).noise([clipped.shape[1]], np.ones((1, 1)), iter([entropy()]))
        found: Matrix = (clipped + noise)[0]
        return found

    release.epsilon, release.clip_norm = EPSILON, 1.0  # type: ignore[attr-defined]
    return release
