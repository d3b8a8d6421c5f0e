"""How far clients agree on the way to go."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def cosines(updates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosine (m, m) of each two of updates (m, n), 0 with one of length 0."""
    lengths = np.linalg.norm(updates, axis=1, keepdims=True)
    unit = updates / np.where(lengths > 0, lengths, 1)
    found: NDArray[np.float64] = np.clip(unit @ unit.T, -1, 1)
    return found
