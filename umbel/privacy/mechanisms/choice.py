"""k-ary randomised response: a client's choice of one of k hypotheses, sometimes replaced by a random one.

A client with OWN trains the hypothesis that fits it best; a client with a number trains that hypothesis. Together
P(best) = e^eps/(e^eps + k - 1) and each other has 1/(e^eps + k - 1). So eps bounds the privacy loss, also against a
reader of the choice who knows eps and k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from umbel.privacy.mechanisms.base import NoiseSource

OWN = -1
"""Train the hypothesis that fits you best."""


def keep_probability(epsilon: float, k: int) -> float:
    """Return the probability of OWN, (e^eps - 1)/(e^eps + k - 1); raise `ValueError` unless eps >= 0 and k >= 1."""
    if not (epsilon >= 0 and k >= 1):
        raise ValueError(f"randomised response needs epsilon >= 0 and k >= 1, got {epsilon} and {k}")
    return -math.expm1(-epsilon) / (1 + (k - 1) * math.exp(-epsilon))


def draw(epsilon: float, k: int, sources: Iterable[NoiseSource]) -> NDArray[np.int64]:
    """Return for each client OWN, or the number of the hypothesis that it trains, shape (clients,).

    Each client's source always gives two numbers, even if one would suffice.
    """
    return at_random(1 - keep_probability(epsilon, k), k, sources)


def at_random(share: float, k: int, sources: Iterable[NoiseSource]) -> NDArray[np.int64]:
    """Return for each client OWN, or with probability `share` one of all k hypotheses; it draws like `draw`."""
    keep = 1 - share
    choices = [OWN if first < keep else int(second * k) for first, second in (source.random(2) for source in sources)]
    # A second number next to 1 times k may round to k.
    return np.minimum(np.array(choices, np.int64), k - 1)
