"""Differences of clients within a group, estimated from releases: the prior of `umbel.models.prior`.

The covariance of a group's releases is that of the trained parameters plus that of the noise, which is public and
isotropic. So the difference estimates the former without bias. It is computed from sanitised releases only, so it costs
no privacy. It concerns updates clipped to the clip norm, and so is known only up to a scale.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.models.prior import LARGEST, Prior, positive
from umbel.privacy.mechanisms import load
from umbel.protocol.arrays import Labels, Matrix, Vectors, in_blocks
from umbel.protocol.release import Clipping
from umbel.protocol.tasks import TrainingSpec

_SCATTER, _WEIGHT, _ERROR = "prior/covariances", "prior/weights", "prior/errors"
_REMEMBERED = 0.5  # weight of earlier rounds: clip norms shrink, and hypotheses settle
_MOST = 100_000  # parameters; with more, the noise of each hides its variance


def look(
    state: dict[str, NDArray[Any]], releases: Vectors, labels: Labels, hypotheses: Matrix, task: TrainingSpec
) -> None:
    """Add a round's releases (m, n), with their hypotheses (m,), to the strategy's `state`."""
    k, n = hypotheses.shape
    noise = noise_variance(task, n)
    if noise is None or n > _MOST:
        return
    shape = (k, n, n) if n <= LARGEST else (k, n)
    if state.get(_SCATTER, np.zeros(0)).shape != shape:
        # The number of hypotheses has changed.
        state[_SCATTER], state[_WEIGHT], state[_ERROR] = np.zeros(shape), np.zeros(k), np.zeros(k)
    means, weights, errors = state[_SCATTER].copy(), state[_WEIGHT] * _REMEMBERED, state[_ERROR].copy()
    for j in range(k):
        rows = np.flatnonzero(labels == j)
        if (more := len(rows) - 1) < 1:
            continue
        found = covariance(releases, rows, noise)
        share = more / (weights[j] + more)
        errors[j] = (1 - share) ** 2 * errors[j] + share**2 * _error(found, noise) / more
        means[j] += share * (found - means[j])
        weights[j] += more
    state[_SCATTER], state[_WEIGHT], state[_ERROR] = means, weights, errors


def _error(found: Matrix, noise: float) -> float:
    """Return the expected squared error of a covariance, times the number of (normal) releases minus one."""
    if found.ndim == 1:
        return float(2 * np.square(found + noise).sum())
    whole = found + noise * np.eye(len(found))
    return float(np.trace(whole) ** 2 + np.square(whole).sum())


def noise_variance(task: TrainingSpec, n: int) -> float | None:
    """Return the variance of the noise on each of n parameters; None if the server does not know it."""
    if not task.noise_multiplier:
        return 0.0
    if task.clipping is not Clipping.PUBLIC:
        return None
    deviation: float = load(task.mechanism)(task.noise_multiplier).deviation(n) * task.clip_norm
    return deviation * deviation


def covariance(releases: Vectors, rows: NDArray[np.int64], noise: float) -> Matrix:
    """Return the covariance (n, n) of some releases minus that of their noise; for many parameters, variances (n,)."""
    n = releases.shape[1]
    if n <= LARGEST:
        found: Matrix = np.cov(releases[rows].astype(np.float64), rowvar=False).reshape(n, n) - noise * np.eye(n)
        return found
    variances = np.empty(n)
    for columns, block in in_blocks(releases, rows):
        variances[columns] = block.var(axis=0, ddof=1) - noise
    return variances


def prior_of(state: dict[str, NDArray[Any]], k: int) -> Prior | None:
    """Return the prior in the state of a strategy of k hypotheses; None if there is none."""
    found = state.get(_SCATTER)
    if found is None or len(found) != k or not math.isfinite(found.sum()) or not state[_WEIGHT].any():
        return None
    # An estimate's square is on average the covariance's square plus that of the error.
    squares = np.square(found).reshape(k, -1).sum(1)
    left = np.maximum(squares - state[_ERROR], 0)
    return Prior(positive(found), left / np.where(squares > 0, squares, 1.0))
