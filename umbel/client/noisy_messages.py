"""The noisy messages of the PAC paper (Eq. 3): Gaussian noise on a client's changes, before the gate.

This is a defence of that paper, which the gate does not count: no ledger knows it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from umbel.privacy.mechanisms.base import NoiseSource
from umbel.protocol.arrays import Arrays


def noisy_messages(
    trained: Arrays,
    hypotheses: Arrays,
    chosen: NDArray[np.int64],
    sigma: float,
    sources: Iterable[NoiseSource],
    everywhere: bool,
) -> Arrays:
    """Return clients' trained arrays (clients, \\*shape), from hypotheses (k, \\*shape), with noise of deviation sigma.

    It is on the changed rows of each array, or on all rows. In the first case the noise shows which rows changed: in a
    recommender, the items that a client labelled.
    """
    noisy = {name: value.copy() for name, value in trained.items()}
    for c, source in zip(range(len(chosen)), sources, strict=True):
        for name, value in noisy.items():
            rows = value[c : c + 1].reshape(value.shape[1] if value.ndim > 1 else 1, -1)
            before = hypotheses[name][chosen[c]].reshape(rows.shape)
            changed = np.full(len(rows), True) if everywhere else (rows != before).any(axis=1)
            drawn = source.standard_normal(int(changed.sum()) * rows.shape[1])
            rows[changed] += sigma * drawn.reshape(-1, rows.shape[1])
    return noisy
