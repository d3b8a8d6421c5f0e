"""Bounds on the distance of a release from the hypotheses, on a site's sum, and on the effect of a single loss."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from umbel.privacy import mechanisms
from umbel.privacy.mechanisms import Mechanism
from umbel.privacy.mechanisms.sanitise import NOISE_STEPS
from umbel.protocol.arrays import Vectors, in_blocks
from umbel.protocol.release import LEAST_CLIP_NORM, Clipping, NoisePer, ReleaseBy
from umbel.protocol.tasks import TrainingSpec

LARGEST_UPDATE = 1e6
"""Maximum norm of an update unless a run sets one: for a model of n parameters, sqrt(n) changes of about 1 are far."""

_RARE = 27.7  # -log of the chance that noise is longer than its mechanism says: 1e-12
_FAR = 10.0  # times the spread of most losses
_SHARE = 0.2  # share of clients that may report arbitrary values


def furthest(task: TrainingSpec, hypotheses: Vectors, most: float = 0.0) -> float:
    """Return the maximum distance of a release from the nearest hypothesis.

    This is the maximum norm of an update plus the norm that the noise exceeds only once in 10^12 releases; infinite for
    a mechanism without such a bound.

    Parameters
    ----------
    hypotheses : ndarray, shape (k, n)
        The hypotheses that were sent.
    most : float
        Maximum norm of an update; 0 for the clip norm if it is public, and otherwise for `LARGEST_UPDATE`.
    """
    n, mechanism = hypotheses.shape[1], _mechanism(task)
    public, whole_vector = task.clipping is Clipping.PUBLIC, task.noise_per is NoisePer.VECTOR
    # A site raises a clip norm to its own floor, which is this where it sets none, and until the noise spans enough
    # steps of 32-bit numbers.
    clip_norm = max(task.clip_norm, LEAST_CLIP_NORM)
    largest = float(max(hypotheses.max(), -hypotheses.min()))
    step = _spacing(largest)
    if mechanism is not None:
        clip_norm = max(clip_norm, NOISE_STEPS * step / mechanism.deviation(n))
    if public:
        update = max(clip_norm, most)
    else:
        # Each layer or row has a separate floor.
        parts = 1 if whole_vector else n
        update = math.hypot(most or LARGEST_UPDATE, clip_norm * math.sqrt(parts))
    reach = update
    if mechanism is not None:
        # A part's noise is longest, in units of its radius, where the part is smallest or largest.
        sizes, rare = ((n,), _RARE) if public or whole_vector else ((1, n), _RARE + math.log(n))
        reach += update * max(mechanism.longest(size, rare) for size in sizes)
    return reach + _rounding(mechanism, n, update, step, reach)


def furthest_sum(task: TrainingSpec, k: int, n: int, clients: int, most: float = 0.0) -> float:
    """Return the maximum norm of the summed updates of a site's clients, of n parameters, for each of k hypotheses.

    This is one clip norm for each client plus the norm that the noise exceeds only once in 10^12 releases.

    Parameters
    ----------
    task : TrainingSpec
        Its clip norm is public.
    most : float
        Maximum norm of an update; 0 for the clip norm.
    """
    mechanism = _mechanism(task)
    clip_norm = max(task.clip_norm, LEAST_CLIP_NORM, most)
    reach = clients * clip_norm
    step = _spacing(reach)
    if mechanism is not None:
        reach += clip_norm * mechanism.longest(n, _RARE + math.log(k))
    return reach + _rounding(mechanism, n, clip_norm, step, reach)


def count_deviation(task: TrainingSpec) -> float:
    """Return the standard deviation of the noise on each count of a site's sums, or of a secure sum."""
    mechanism = _mechanism(task)
    if task.release_by is ReleaseBy.SECURE:
        return task.noise_multiplier * (math.sqrt(2) if task.moments else 1.0)  # a count weighs a clip norm, or less
    return 0.0 if mechanism is None else mechanism.deviation(1) * mechanism.count_radius(task.choice_epsilon)


def _mechanism(task: TrainingSpec) -> Mechanism | None:
    nu = task.noise_multiplier
    return mechanisms.load(task.mechanism)(nu) if nu > 0 else None


def _spacing(largest: float) -> float:
    return float(np.spacing(np.float32(min(largest, 3e38))))


def _rounding(mechanism: Mechanism | None, n: int, radius: float, step: float, reach: float) -> float:
    """Return the effect on a norm of rounding to 32 bits, and to a grid of at most 1/16 of a coordinate's noise."""
    grid = 0.0 if mechanism is None else mechanism.deviation(n) * radius / NOISE_STEPS
    return math.sqrt(n) * (grid + 2 * (step + reach * 2.0**-23))


def near(vectors: Vectors, hypotheses: NDArray[np.float64], reach: float) -> NDArray[np.bool_]:
    """Return which of the vectors (m, n) lie within reach of one of the hypotheses (k, n)."""
    # A matrix product avoids a copy of vectors that may be large; if rounding could matter, the result is exact.
    squares = np.zeros((len(vectors), len(hypotheses)))
    for columns, block in in_blocks(vectors):
        squares += np.einsum("ij,ij->i", block, block)[:, None] - 2 * (block @ hypotheses[:, columns].T)
    squares += np.einsum("ij,ij->i", hypotheses, hypotheses)
    inside: NDArray[np.bool_] = squares.min(axis=1, initial=math.inf) <= reach**2
    for i in np.flatnonzero(~inside).tolist():
        inside[i] = np.linalg.norm(hypotheses - vectors[i], axis=1).min() <= reach
    return inside


def pulled_in(values: NDArray[np.float64], ordered: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return values (m,) of clients, with those far from all others pulled in.

    `ordered` has the same values sorted, if known. Values with the usual spread of losses stay unchanged, so that their
    mean is the plain one. A value is far at ten times the distance within which four in five clients lie from the
    median, or at ten times the distance of the median from 0. If at most one in five values is negative, the result has
    no negative value, as with losses.

    So if at most one in five clients reports an arbitrary value, each of them counts as at most ten times the honest
    scale: among twenty losses near .8 one moves the mean by at most .4, and not to 1e37.
    """
    if len(values) < 3:
        return values
    ordered = np.sort(values) if ordered is None else ordered
    middle = _middle(ordered)
    apart = np.sort(np.abs(ordered - middle))
    width = _FAR * max(float(apart[int((1 - _SHARE) * (len(values) - 1))]), abs(middle))
    if width == 0 and apart[-1] > 0:
        # If most are 0, as for a hinge loss that is met, the scale is that of the others.
        width = _FAR * _middle(apart[apart > 0])
    low, high = middle - width, middle + width
    if ordered[math.ceil(_SHARE * (len(values) - 1))] >= 0:
        low = max(low, 0.0)
    return values if low <= ordered[0] and ordered[-1] <= high else np.clip(values, low, high)


def _middle(ordered: NDArray[np.float64]) -> float:
    """Return the median of sorted values (m,)."""
    half = len(ordered) // 2
    return float(ordered[half]) if len(ordered) % 2 else float(ordered[half - 1] + ordered[half]) / 2
