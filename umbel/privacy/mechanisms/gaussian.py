"""The Gaussian mechanism: independent normals whose deviation is nu times the radius.

nu is the field's usual noise multiplier. Between inputs a distance d apart, in radii, the privacy loss is normal with
mean mu^2/2 and variance mu^2, mu = d/nu, for any number of components. So is the loss of many releases, whose mu^2 add
up. There is no pure epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from umbel.privacy.mechanisms.base import Loss, Matrix, Mechanism, NoiseSource, each, of_any_sign, stacked


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """Normal noise of deviation `noise_multiplier` times the radius in each component."""

    name: ClassVar[str] = "gaussian"

    def noise(self, sizes: Sequence[int], radii: Matrix, generators: Iterator[NoiseSource]) -> Matrix:
        n = sum(sizes)
        noise = stacked([generator.standard_normal(n) for generator in each(generators, len(radii))], n)
        noise *= np.repeat(self.noise_multiplier * radii, sizes, axis=1)
        return noise

    def deviation(self, n: int) -> float:
        return self.noise_multiplier

    def longest(self, n: int, rare: float) -> float:
        """Return the concentration bound for the norm, a 1-Lipschitz function (Boucheron, Lugosi and Massart, Theorem
        5.6)."""
        return self.noise_multiplier * (math.sqrt(n) + math.sqrt(2 * rare))

    def count_radius(self, choice_epsilon: float) -> float:
        """Return 1: sums in radii and counts together move by at most sqrt(1 + 1 + 1 + 1) = 2, as one sum alone may."""
        return 1.0

    def pure(self, n: int, distance: int) -> Fraction | None:
        return None

    def loss(self, n: int, distance: float) -> Loss:
        return GaussianLoss(distance / self.noise_multiplier)


@dataclass(frozen=True)
class GaussianLoss(Loss):
    """N(mu^2/2, mu^2), where mu >= 0 is the distance of the inputs in deviations of the noise."""

    mu: float

    @property
    def mean(self) -> float:
        return self.mu * self.mu / 2

    @property
    def deviation(self) -> float:
        return self.mu

    @property
    def largest(self) -> float:
        return math.inf if self.mu else 0.0

    def delta(self, epsilons: Matrix) -> Matrix:
        """Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu) (Balle and Wang 2018, Theorem 5)."""
        from scipy import special  # the import takes a moment

        epsilons = np.asarray(epsilons, np.float64)
        if not self.mu:
            return np.maximum(-np.expm1(epsilons), 0.0)
        size = np.abs(epsilons)
        far = size / self.mu
        # In logarithms, since exp(epsilon) may overflow where its factor is below one.
        above = special.log_ndtr(self.mu / 2 - far)
        below = special.log_ndtr(-self.mu / 2 - far)
        positive = np.exp(above) * -np.expm1(np.minimum(size + below - above, 0.0))
        return of_any_sign(epsilons, positive)


def calibrate(epsilon: float, delta: float, distance: float) -> float:
    """Return the smallest nu for which one release is (epsilon, delta)-private between inputs `distance` radii apart.

    Balle and Wang's (2018) analytic calibration, to nine digits, and never with too little noise. Raise `ValueError`
    unless epsilon and distance are above 0 and delta between 0 and 1.
    """
    if not (0 < epsilon < math.inf and 0 < delta < 1 and 0 < distance < math.inf):
        raise ValueError(f"cannot calibrate for epsilon {epsilon}, delta {delta} and distance {distance}")
    from scipy.optimize import brentq  # the import takes a third of a second

    def excess(log_mu: float) -> float:
        return float(GaussianLoss(math.exp(log_mu)).delta(np.array([epsilon]))[0]) / delta - 1

    # Outside these mu, delta is below 1e-300, or within 1e-16 of 1.
    low, high = math.log(epsilon / (40 + math.sqrt(2 * epsilon + 1600))), math.log(20 + math.sqrt(2 * epsilon + 400))
    log_mu = brentq(excess, low, high, xtol=1e-12, rtol=1e-14)
    return distance * math.exp(1e-10 - log_mu)
