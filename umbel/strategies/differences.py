"""Differences of clients within a group, estimated from releases: the prior of `umbel.models.prior`.

The covariance of a group's releases is that of the trained parameters plus that of the noise, which is public and
isotropic. So the difference estimates the former without bias. It is computed from sanitised releases only, so it costs
no privacy. It concerns updates clipped to the clip norm, and so is known only up to a scale. A secure sum, which has no
single releases, may have second moments instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.models.prior import Prior, positive
from umbel.privacy.mechanisms import load
from umbel.protocol.arrays import LARGEST_COVARIANCE, Labels, Matrix, Vectors, in_blocks
from umbel.protocol.release import Clipping
from umbel.protocol.releases import Sums
from umbel.protocol.tasks import TrainingSpec

_SCATTER, _WEIGHT, _ERROR = "prior/covariances", "prior/weights", "prior/errors"
_REMEMBERED = 0.5  # weight of earlier rounds: clip norms shrink, and hypotheses settle
_MOST = 100_000  # parameters; with more, the noise of each hides its variance


def add_releases(
    state: dict[str, NDArray[Any]], releases: Vectors, labels: Labels, hypotheses: Matrix, task: TrainingSpec
) -> None:
    """Add a round's releases (m, n), with their hypotheses (m,), to the strategy's `state`."""
    k, n = hypotheses.shape
    noise = noise_variance(task, n)
    # How much of the noise in training, or on changed rows, is left in a release depends on the client.
    if noise is None or task.row_privacy or task.message_noise or n > _MOST:
        return
    seen = {}
    for j in range(k):
        rows = np.flatnonzero(labels == j)
        if (more := len(rows) - 1) >= 1:
            found = covariance(releases, rows, noise)
            seen[j] = found, float(more), _error(found, noise) / more
    _remember(state, (k, n, n) if n <= LARGEST_COVARIANCE else (k, n), seen)


def add_sums(state: dict[str, NDArray[Any]], sums: Sums, task: TrainingSpec) -> None:
    """Add a round's secure sum, with second moments, to the strategy's `state`."""
    assert sums.moments is not None
    k, n = sums.sums.shape[1:]
    noise, seen = task.noise_multiplier * task.clip_norm, {}
    counts, deviation = sums.counts.sum(axis=0), math.sqrt(2) * task.noise_multiplier
    for j in range(k):
        # With few clients there is only noise.
        if (number := float(counts[j])) < max(2.0, 2 * deviation):
            continue
        mean, matrix = sums.sums[:, j].sum(axis=0) / number, sums.moments.ndim == 3
        about = np.outer(mean, mean) if matrix else np.square(mean)
        # The mean's noise adds to its square, on the diagonal.
        about = about - (noise / number) ** 2 * (np.eye(n) if matrix else 1.0)
        found = (sums.moments[j] / number - about) * (number / (number - 1))
        # A moment has noise of sqrt(2) clip norms' on the diagonal, and of one clip norm's off it.
        moments = (noise * task.clip_norm / number) ** 2 * n * ((n + 1) if matrix else 2)
        seen[j] = found, number - 1, _error(found, 0.0) / (number - 1) + moments
    _remember(state, sums.moments.shape, seen)


def _remember(
    state: dict[str, NDArray[Any]], shape: tuple[int, ...], seen: Mapping[int, tuple[Matrix, float, float]]
) -> None:
    """Add covariances, each with its weight and expected squared error, by hypothesis, to what is known."""
    if state.get(_SCATTER, np.zeros(0)).shape != shape:
        # The number of hypotheses has changed.
        k = shape[0]
        state[_SCATTER], state[_WEIGHT], state[_ERROR] = np.zeros(shape), np.zeros(k), np.zeros(k)
    means, weights, errors = state[_SCATTER].copy(), state[_WEIGHT] * _REMEMBERED, state[_ERROR].copy()
    for j, (found, more, error) in seen.items():
        share = more / (weights[j] + more)
        errors[j] = (1 - share) ** 2 * errors[j] + share**2 * error
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
    """Return the variance of the gate's noise on each of n parameters; None if the server does not know it."""
    if not task.noise_multiplier:
        return 0.0
    if task.clipping is not Clipping.PUBLIC:
        return None
    deviation: float = load(task.mechanism)(task.noise_multiplier).deviation(n) * task.clip_norm
    return deviation * deviation


def covariance(releases: Vectors, rows: NDArray[np.int64], noise: float) -> Matrix:
    """Return the covariance (n, n) of some releases minus that of their noise; for many parameters, variances (n,)."""
    n = releases.shape[1]
    if n <= LARGEST_COVARIANCE:
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
