"""The privacy loss of the Laplace mechanism under Euclidean distance.

Distances are in units of 1/epsilon: two centres a distance s apart, the foci, and a
point at distances a and b from them, of density exp(-a), give the loss L = b - a. In the coordinates
u = a + b in (s, inf) and L in (-s, s), prolate spheroidal ones, the volume is proportional to
((u^2 - s^2)(s^2 - L^2))^((n-3)/2) (u^2 - L^2) du dL and the density to exp((L - u)/2). Since
u^2 - L^2 = (u^2 - s^2) + (s^2 - L^2), the integral over u leaves for L, with v = 1 - (L/s)^2, a density
proportional to

    exp(L/2) v^((n-3)/2) (c + v),    c = E[(u/s)^2 - 1] = (2 (n-1)/s) K_{n/2}(s/2) / K_{n/2-1}(s/2),

the expectation being over the density exp(-u/2) (u^2 - s^2)^((n-3)/2) and K the Bessel function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from umbel.privacy.mechanisms.base import Loss, Matrix, of_any_sign

# Nodes of the quadrature on each of two panels. A density is followed until it has fallen by exp(-_DROP),
# and exp(-L) counts as zero at _FLAT.
_NODES = 100
_DROP = 50.0
_FLAT = 40.0
_HALVINGS = 24
# Number of epsilons at a time, which bounds the memory.
_AT_ONCE = 1000
# Steps of the recurrence for the ratio of Bessel functions.
_STEPS = 2000


@dataclass(frozen=True)
class LaplaceLoss(Loss):
    """The loss between two centres `shift` apart under a density proportional to exp(-|x|)."""

    n: int  # components, at least 1
    shift: float
    """Epsilon of the noise times the distance of the inputs, at least 0; the digits of `delta` are tested from 1e-3 to
    1e6."""

    def __post_init__(self) -> None:
        if not (self.n >= 1 and self.shift >= 0):
            raise ValueError(f"the Laplace mechanism needs n >= 1 and a shift >= 0, got {self.n} and {self.shift}")

    @property
    def mean(self) -> float:
        return _moments(self.n, self.shift)[0]

    @property
    def deviation(self) -> float:
        return _moments(self.n, self.shift)[1]

    @property
    def largest(self) -> float:
        return self.shift

    def delta(self, epsilons: Matrix) -> Matrix:
        epsilons = np.asarray(epsilons, np.float64)
        size = np.minimum(np.abs(epsilons), self.shift)
        if self.n == 1 or self.shift == 0:
            # The Laplace mechanism on the line, or a shift of 0.
            positive = -np.expm1((size - self.shift) / 2)
        else:
            # Integrating a nonnegative function loses no digits, as 1 - F(eps) - e^eps F(-eps) would.
            positive = np.concatenate(
                [self._positive(some) for some in np.array_split(size, max(1, len(size) // _AT_ONCE))]
            )
        return of_any_sign(epsilons, positive)

    def _positive(self, epsilons: Matrix) -> Matrix:
        """Return delta at epsilons between 0 and `shift`, for n >= 2."""
        excess, weights, scale = _points(self.n, self.shift, epsilons)
        delta: Matrix = (weights * -np.expm1(-excess)).sum(0) * np.exp(scale - _moments(self.n, self.shift)[2])
        return delta


@lru_cache(maxsize=256)
def _mode(n: int, shift: float) -> float:
    """Return approximately where the density of t = sqrt(shift - L) for L >= 0 is greatest.

    It is a mixture of exp(-t^2/2) v^m t at m = (n - 3)/2 and (n - 1)/2; this is the mode halfway between.
    """
    b, c = 2 * shift + 2 * n - 3, (n - 1) * 2 * shift
    return min(math.sqrt(2 * c / (b + math.sqrt(b * b - 4 * c))), math.sqrt(shift))


def _log_density(n: int, shift: float, t: Matrix) -> Matrix:
    """Return the logarithm of the density of t = sqrt(shift - L) for L >= 0, minus that at its mode.

    In t the density is smooth; in L it behaves near L = shift like a power of (n - 3)/2. For a million components the
    logarithm itself would be a million, and lose as many digits.
    """
    mode, t = _mode(n, shift), np.maximum(t, 1e-150)
    w, w_mode = t / shift * t, mode / shift * mode
    v, v_mode = w * (2 - w), w_mode * (2 - w_mode)
    gain = (mode - t) * (mode + t)  # of L
    change = -gain / shift * (2 - w - w_mode) / v_mode  # relative change of v
    log_v = np.where(np.abs(change) < 0.5, np.log1p(np.clip(change, -0.5, 0.5)), np.log(v / v_mode))
    ratio = _ratio(n, shift)
    log_density: Matrix = gain / 2 + (n - 3) / 2 * log_v + np.log((ratio + v) / (ratio + v_mode)) + np.log(t / mode)
    return log_density


def _points(n: int, shift: float, epsilons: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Return a quadrature of the losses L above each of m epsilons between 0 and `shift`, for n >= 2.

    The result is ``L - epsilon`` (nodes, m), the measure of each node times a constant (nodes, m), and the values (m,)
    to add to their logarithms to make the constant the same for each epsilon.
    """
    end = np.sqrt(shift - epsilons)
    mode = np.minimum(_mode(n, shift), end)
    scale = _log_density(n, shift, mode)
    # Bisect for the points where the density has fallen, on either side of the mode.
    sides = []
    for bound in (np.zeros_like(end), end):
        inner, outer = mode, bound
        for _ in range(_HALVINGS):
            middle = (inner + outer) / 2
            inside = _log_density(n, shift, middle) > scale - _DROP
            inner, outer = np.where(inside, middle, inner), np.where(inside, outer, middle)
        sides.append(outer)
    low, high = sides
    # 1 - exp(epsilon - L) bends within a few units of L, and the density elsewhere: one panel for each.
    split = np.clip(np.sqrt(np.maximum(shift - epsilons - _FLAT, 0)), low, high)
    nodes, weights = _quadrature()
    t = np.concatenate([low + (split - low) * nodes, split + (high - split) * nodes])
    measure = np.concatenate([(split - low) * weights, (high - split) * weights])
    return (end - t) * (end + t), measure * np.exp(_log_density(n, shift, t) - scale), scale


@cache
def _quadrature() -> tuple[Matrix, Matrix]:
    """Return nodes and weights of Gauss-Legendre quadrature on (0, 1), as columns."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return (nodes[:, None] + 1) / 2, weights[:, None] / 2


@lru_cache(maxsize=256)
def _moments(n: int, shift: float) -> tuple[float, float, float]:
    """Return mean and standard deviation of the loss, and the logarithm of the density's integral in t."""
    if n == 1 or shift == 0:
        # Atoms at both ends, of 1/2 at `shift`, and a density exp((L - shift)/2)/4 in between.
        if shift < 1e-3:
            # The series: the closed forms below lose their digits.
            return shift * shift / 2, shift * math.sqrt(1 - shift / 3), 0.0
        mean = shift + math.expm1(-shift)
        second = shift * shift - 2 * shift + 4 - (2 * shift + 4) * math.exp(-shift)
        return mean, math.sqrt(second - mean * mean), 0.0
    losses, weights, scale = _points(n, shift, np.zeros(1))
    # The density at -L is exp(-L) of that at L.
    mirror = np.exp(-losses)
    total = float((weights * (1 + mirror)).sum())
    mean = float((weights * (1 - mirror) * losses).sum()) / total
    second = float((weights * (1 + mirror) * np.square(losses)).sum()) / total
    return mean, math.sqrt(max(second - mean * mean, 0.0)), float(scale[0]) + math.log(total)


@lru_cache(maxsize=256)
def _ratio(n: int, shift: float) -> float:
    """Return c = E[(u/s)^2 - 1] for n >= 2."""
    from scipy import special  # the import takes a moment

    kappa, order = shift / 2, n / 2 - 1
    steps = int(order)
    least = order - steps
    ratio = float(special.k1e(kappa) / special.k0e(kappa)) if least == 0 else 1 + 1 / kappa
    if steps > _STEPS:
        # The recurrence forgets its start, so it may start nearby, at an asymptotic ratio.
        steps, least = _STEPS, order - _STEPS
        ratio = (least + 0.5 + math.hypot(least + 0.5, kappa)) / kappa
    for step in range(1, steps + 1):
        ratio = 2 * (least + step) / kappa + 1 / ratio
    return 2 * (n - 1) / shift * ratio
