"""The privacy loss of a release that the server reads in a shuffled batch, without its sender.

The batch holds N releases. One is the client's own. With the probability gamma, the mass of the blanket, each other one
is a draw from the blanket, for any data of its client. Suppose that the server is also told which are not such
draws, and who sent them. It then has to find out the client's release among those from the blanket. Balle, Bell, Gascon
and Nissim (The Privacy Blanket of the Shuffle Model, 2019, Lemma 5.3) show that

    delta(epsilon) <= E[(Z_1 + ... + Z_N)+] / N,    Z = A - e^epsilon B with probability gamma, otherwise 0.

A and B are the ratios of `umbel.privacy.accounting.blanket` at a draw from the blanket. The computed number is an upper
bound of the right-hand side:

- In a cell, Z becomes a variable with the same mean and two values, multiples of a grid's step outside the range of Z.
  It is larger in the convex order, hence the sum is, hence E[(sum)+].
- A fast Fourier transform computes the law of the sum, as Su et al. (2025, arXiv 2504.07414) do. The law of Z is first
  weighted by exp(tilt Z), so that the sum is near 0 and small deltas keep their digits.
- Chernoff's bound covers sums above the range of the transform. Sums below it reappear in it, which only adds.
- Between computed epsilons, delta is interpolated linearly in e^epsilon, in which it is convex.
- Bounds on rounding errors are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy import fft

from umbel.privacy.accounting.accountant import Together, compose
from umbel.privacy.accounting.blanket import FURTHEST, OUTSIDE, Cells, blanket, covered
from umbel.privacy.accounting.guarantee import Guarantee, guarantee
from umbel.privacy.mechanisms import load
from umbel.privacy.mechanisms.base import Loss, Matrix, Mechanism, of_any_sign
from umbel.privacy.mechanisms.choice import RandomisedResponse
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Kind, Release

# The grid's step, in deviations of Z and in its largest value, and the most steps between its least and largest values.
_STEP, _PARTS, _MAX_GRID = 0.04, 100, 2**17
# The longest transform; beyond it there is no bound.
_MAX_TRANSFORM = 2**23
# Sums outside the transform's range have at most the probability exp(-_FAR), by Chernoff's bound.
_FAR = 30.0
# Rounding error of a step of a transform, as a share of its norm, and of each mean, as a share.
_ROUNDING, _SLACK = 1e-15, 1e-9
# Epsilons of a table: so many in a deviation, each so much further from the next than the last two.
_DENSITY, _GROWTH = 12, 1.02
# The largest epsilon of a table, and exponent of a weight.
_MAX_EXPONENT = 200.0
# Halvings of the interval that a tilt lies in; any tilt gives a bound.
_HALVINGS = 6
# More epsilons than these are interpolated.
_FEW = 2


def hockey_stick(cells: Cells, batch: int, epsilon: float) -> float:
    """Return an upper bound of delta at `epsilon` >= 0 for one of `batch` shuffled releases."""
    more = math.exp(epsilon)
    low = cells.first[0] - more * cells.second[2]
    mean = cells.first[1] * (1 + _SLACK) - more * cells.second[1] * (1 - _SLACK)
    high = np.maximum(cells.first[2] - more * cells.second[0], mean)
    top = float(high.max())
    if top <= 0:
        return OUTSIDE
    deviation = math.sqrt(float(cells.mass @ np.square(mean)))
    step = max(min(_STEP * deviation, top / _PARTS), (top - float(low.min())) / _MAX_GRID)
    below = np.floor(low / step).astype(np.int64)
    above = np.maximum(np.ceil(high / step).astype(np.int64), below + 1)
    share = np.clip((mean / step - below) / (above - below), 0, 1) * cells.mass
    first = min(int(below.min()), 0)
    size = int(above.max()) - first + 1
    masses = np.zeros(size)
    masses += np.bincount(below - first, cells.mass - share, size)
    masses += np.bincount(above - first, share, size)
    masses[-first] += max(1 - float(cells.mass.sum()), 0.0)
    return min(_expected_excess(masses, first, batch) * step / batch + OUTSIDE, 1.0)


def _expected_excess(masses: Matrix, first: int, times: int) -> float:
    """Return an upper bound of E[S+], S the sum of `times` whole numbers of law `masses` from `first` on."""
    some = np.flatnonzero(masses)
    values, weights = (some + first).astype(np.float64), masses[some]
    if values[-1] <= 0:
        return 0.0

    def tilted(tilt: float) -> tuple[float, Matrix]:
        exponents = tilt * values
        peak = float(exponents.max())
        raw = weights * np.exp(exponents - peak)
        total = float(raw.sum())
        return peak + math.log(total), raw / total

    tilt = _centre(lambda tilt: float(tilted(tilt)[1] @ values), values, weights)
    log_moment, law = tilted(tilt)
    spread = math.sqrt(times * max(float(law @ np.square(values)) - float(law @ values) ** 2, 1 / times))
    # P(S > x) <= E[exp(slope S)] exp(-slope x) for any slope. The first are good for a sum that is nearly normal, the
    # others for one of a few rare summands.
    above = [c / spread for c in (1, 2, 4, 6, 8)] + [c / max(values[-1], -values[0]) for c in (2, 8, 16, 32)]
    below = [*above, *(part * tilt for part in (0.5, 0.9) if tilt)]
    high, slope = min((_reach(tilted(tilt + slope)[0] - log_moment, times, slope), slope) for slope in above)
    low = min(_reach(tilted(tilt - slope)[0] - log_moment, times, slope) for slope in below)
    high = max(math.ceil(min(high, times * values[-1])), 1)
    low = max(math.ceil(min(low, -times * values[0])), 1)
    size = fft.next_fast_len(high + low + 1, real=True)
    if size > _MAX_TRANSFORM:
        return math.inf
    sums = np.arange(1, size - low, dtype=np.float64)
    worth = sums * np.exp(-tilt * sums)
    chances = fft.irfft(fft.rfft(np.bincount((some + first) % size, law, size)) ** times, size)
    # A transform errs by a share of its Euclidean norm, and the power by that of `times` factors.
    rounding = _ROUNDING * math.log2(size) * (times + 2) * float(np.linalg.norm(law) * np.linalg.norm(worth))
    inside = max(float(chances[1 : size - low] @ worth), 0.0) + rounding
    # E[S+ exp(-tilt S); S > high], as P(S > high) and E[(S - high)+] slope are at most exp(-_FAR).
    beyond = (high + 1 / slope) * math.exp(-_FAR - tilt * high)
    return math.exp(min(times * log_moment + math.log(inside + beyond), 700.0))


def _centre(mean_at: Callable[[float], float], values: Matrix, weights: Matrix) -> float:
    """Return a tilt >= 0 at which the mean is about 0; 0 if it is not below 0 without a tilt."""
    mean, largest = float(weights @ values), _MAX_EXPONENT / max(values[-1], 1.0)
    if mean >= 0:
        return 0.0
    low, high = 0.0, min(-mean / float(weights @ np.square(values)), largest)
    while high < largest and mean_at(high) < 0:
        low, high = high, min(2 * high, largest)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_at(middle) < 0 else (low, middle)
    return low


def _reach(log_growth: float, times: int, slope: float) -> float:
    """Return x with P(S > x) <= exp(-_FAR), by the growth of log E[exp(tilt Z)] over `slope`."""
    return (times * log_growth + _FAR) / slope


@dataclass(frozen=True)
class Anonymous(Loss):
    """The loss of a release, noise and choice, that is one of at least `batch` shuffled ones.

    `delta` is an upper bound, and never above that of the release with its sender.

    Attributes
    ----------
    mechanism : Mechanism or None
        Of the noise, with the clip norm as its radius; None for a choice alone.
    n, hypotheses, choice_epsilon
        As in a `Release`.
    batch : int
        N, at least 1, the client's own release included.
    distance : float
        Of the client's updates under the two data sets, in clip norms. Below `FURTHEST` both prefer one hypothesis.
    """

    mechanism: Mechanism | None
    n: int
    hypotheses: int
    choice_epsilon: float
    batch: int
    distance: float = FURTHEST

    @property
    def with_sender(self) -> Loss:
        """The loss of the release if its sender is known."""
        parts: list[Loss] = []
        if self.mechanism is not None:
            loss = self.mechanism.loss(self.n, self.distance)
            assert loss is not None, "its blanket is known"
            parts.append(loss)
        if (self.hypotheses > 1 and self.distance == FURTHEST) or not parts:
            parts.append(RandomisedResponse(self.choice_epsilon, self.hypotheses))
        return parts[0] if len(parts) == 1 else Together(tuple((loss, 1) for loss in parts))

    @property
    def mean(self) -> float:
        return min(self.with_sender.mean, self.deviation**2 / 2)

    @property
    def deviation(self) -> float:
        cells, largest = self._cells, self.with_sender.deviation
        if cells is None:
            return largest
        return min(largest, math.sqrt(float(cells.mass @ np.square(cells.first[1] - cells.second[1])) / self.batch))

    @property
    def largest(self) -> float:
        return self.with_sender.largest

    @property
    def _cells(self) -> Cells | None:
        return blanket(self.mechanism, self.n, self.hypotheses, self.choice_epsilon, self.distance)

    def delta(self, epsilons: Matrix) -> Matrix:
        epsilons = np.asarray(epsilons, np.float64)
        if self._cells is None:
            return self.with_sender.delta(epsilons)
        size = np.minimum(np.abs(epsilons), _MAX_EXPONENT)
        if len(epsilons) <= _FEW:
            positive = _deltas(self, size)
        else:
            at, deltas = _table(self)
            positive = np.interp(np.exp(np.minimum(size, at[-1])), np.exp(at), deltas)
        return of_any_sign(epsilons, np.where(size < self.largest, positive, 0.0))


def _deltas(loss: Anonymous, epsilons: Matrix) -> Matrix:
    cells = loss._cells
    assert cells is not None, "it has a blanket"
    shuffled = [hockey_stick(cells, loss.batch, epsilon) for epsilon in epsilons]
    return np.minimum(shuffled, loss.with_sender.delta(epsilons))


@lru_cache(maxsize=64)
def _table(loss: Anonymous) -> tuple[Matrix, Matrix]:
    """Return epsilons from 0 on, and delta at each."""
    cells = loss._cells
    assert cells is not None, "it has a blanket"
    largest = min(loss.largest, _MAX_EXPONENT)
    at, deltas, width = [0.0], [1.0], loss.deviation / _DENSITY
    while at[-1] < largest and deltas[-1] > 2 * OUTSIDE:
        at.append(min(at[-1] + width, largest))
        deltas.append(hockey_stick(cells, loss.batch, at[-1]))
        width *= _GROWTH
    deltas[0] = hockey_stick(cells, loss.batch, 0.0)
    return np.array(at), np.minimum(deltas, loss.with_sender.delta(np.array(at)))


def anonymous(release: Release, times: int, batch: int, delta: float, distance: float = FURTHEST) -> Guarantee | None:
    """Return the guarantee to a client whose releases are each one of at least `batch` shuffled ones.

    It holds against a server that does not know the sender of a release. Without the shuffle, or if the relay tells the
    server whose releases are whose, only `guarantee` holds. At delta 0 both are the same.

    Parameters
    ----------
    release : Release
        Of a client.
    times : int
        Number of participations; each round's batch is shuffled by itself.
    batch : int
        N, at least 1: the client's own release and those of clients that do not work with the server, all made for the
        same hypotheses with the same noise.
    delta : float
    distance : float
        Below `FURTHEST`, the guarantee is for two data sets of a client whose updates are at most so many clip norms
        apart in each participation, and start from the same hypothesis (d-privacy).

    Returns
    -------
    Guarantee or None
        None if a release has no guarantee even with its batch.

    Raises
    ------
    ConfigError
        If there is no bound for the mechanism or the kind of release.
    """
    if batch < 1:
        raise ValueError(f"a batch holds at least 1 release, got {batch}")
    if not 0 < distance <= FURTHEST:
        raise ValueError(f"two clipped updates are up to {FURTHEST:g} clip norms apart, not {distance}")
    mechanism = load(release.mechanism)(release.noise_multiplier) if release.noise_multiplier > 0 else None
    if release.kind is not Kind.TRAIN or not (mechanism is None or covered(mechanism)):
        raise ConfigError(
            "anonymous releases have an account only for clients' releases with mechanism laplace or gaussian; choose "
            "one of these, or leave out --anonymous",
            code="config.anonymous",
        )
    local = guarantee({release: times}, delta)
    loss = Anonymous(mechanism, release.n, release.hypotheses, release.choice_epsilon, batch)
    if local is None:
        return local
    if distance < FURTHEST:
        near = replace(loss, distance=distance)
        found = [near, near.with_sender, loss]
        # The sender's name does not matter to a pure epsilon.
        local = replace(local, pure=min(local.pure, times * near.with_sender.largest))
    else:
        found = [loss]
    epsilons = [compose({one: times}, delta) for one in found if not isinstance(one, Anonymous) or one._cells]
    return replace(local, epsilon=min(local.pure, local.epsilon, *epsilons))


def choice_alone(hypotheses: int, choice_epsilon: float, times: int, batch: int, delta: float) -> float:
    """Return the epsilon at `delta` of so many choices in shuffled batches, without vectors."""
    return compose({Anonymous(None, 1, hypotheses, choice_epsilon, batch): times}, delta)
