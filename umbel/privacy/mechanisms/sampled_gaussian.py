"""The privacy loss of one step of DP-SGD: the Gaussian mechanism on a random sample of rows.

A step draws each row with probability q, in secret, and adds normal noise of sigma clip norms to the sum of clipped
gradients. Without a row, the noise is around some point. With it, the noise is around the same point with probability
1 - q, and otherwise up to one clip norm away (Mironov, Talwar and Zhang 2019, Theorem 4). So a step is bounded by the
pair N(0, sigma^2) and (1 - q) N(0, sigma^2) + q N(1, sigma^2). It is not symmetric: to remove a row reveals more than
to add one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from umbel.privacy.mechanisms.base import Loss, Matrix, of_any_sign
from umbel.privacy.mechanisms.gaussian import GaussianLoss

_BIGGEST = 700.0  # exponents below it do not overflow
_FAR = 10.0  # deviations of noise
_MOST_NOISE = 1e100  # its square does not overflow, and more noise hides no less
_RARE = math.log(1e60)  # of a sample that is cut, the negative logarithm of the probability


@dataclass(frozen=True)
class SampledGaussianLoss(Loss):
    """The loss of one step, for a row that is added or removed, whichever is worse.

    `delta` is the larger of both. `umbel.privacy.accounting.accountant` composes many steps for each of both, since the
    larger of both composed is smaller than a composition of the larger.
    """

    noise_multiplier: float  # sigma, above 0
    rate: float  # q, above 0 and below 1

    @property
    def mean(self) -> float:
        return self.deviation**2 / 2

    @property
    def deviation(self) -> float:
        """The variance of the likelihood ratio bounds the variance of a small loss; that of the noise any."""
        precision = self.noise_multiplier**-2
        if precision > _BIGGEST:
            return 1 / self.noise_multiplier
        return math.sqrt(min(math.log1p(self.rate**2 * math.expm1(precision)), precision))

    @property
    def largest(self) -> float:
        return math.inf

    @property
    def width(self) -> float:
        """Width of the range in which losses lie, except with a probability below 1e-20."""
        sigma, q = self.noise_multiplier, self.rate
        highest = np.logaddexp(math.log1p(-q), math.log(q) + (1 / 2 + _FAR * sigma) / sigma**2)
        return float(highest - math.log1p(-q))

    def delta(self, epsilons: Matrix) -> Matrix:
        """The larger delta, of the mixture against the normal and of the normal against the mixture.

        The likelihood ratio 1 - q + q exp((x - 1/2) / sigma^2) grows with x. So each delta is a difference of tails
        beyond the point where it equals exp(epsilon), or up to the point where it equals exp(-epsilon).
        """
        from scipy import special  # the import takes a moment

        epsilons = np.asarray(epsilons, np.float64)
        size, q, sigma = np.abs(epsilons), self.rate, self.noise_multiplier
        # In logarithms, since exp(epsilon) may overflow: log((exp(e) - 1 + q) / q).
        far = size + np.log1p(-(1 - q) * np.exp(-size)) - math.log(q)
        point = 0.5 + sigma**2 * far
        removed = (
            q * special.ndtr((1 - point) / sigma)
            + (1 - q) * special.ndtr(-point / sigma)
            - np.exp(np.minimum(size + special.log_ndtr(-point / sigma), 0.0))
        )
        left = np.exp(-size) - (1 - q)
        near = 0.5 + sigma**2 * np.log(np.where(left > 0, left, q) / q)
        # 1 - (1 - q) exp(epsilon), which is never negative here, is the weight of the normal's own tail.
        weight = np.where(left > 0, left * np.exp(np.where(left > 0, size, 0.0)), 0.0)
        gone = q * np.exp(np.where(left > 0, size, 0.0)) * special.ndtr((near - 1) / sigma)
        added = np.where(left > 0, weight * special.ndtr(near / sigma) - gone, 0.0)
        return of_any_sign(epsilons, np.maximum(np.maximum(removed, added), 0.0))


def step_losses(noise_multiplier: float, rate: float, steps: int) -> dict[Loss, int]:
    """Return the losses of so many steps, with their numbers; without sampling they are those of normal noise."""
    noise_multiplier = min(noise_multiplier, _MOST_NOISE)
    if rate >= 1:
        return {GaussianLoss(1 / noise_multiplier): steps}
    return {SampledGaussianLoss(noise_multiplier, rate): steps}


def most_drawn(rows: int, rate: float) -> int:
    """Return how many rows a step takes at most, of a client with at most so many: all others are left out.

    The work of a step then has a bound that everybody knows. By Bernstein's inequality, at most one sample in 1e60 is
    larger.
    """
    third, variance = _RARE / 3, rows * rate * (1 - rate)
    return min(rows, math.floor(rows * rate + third + math.sqrt(third**2 + 2 * _RARE * variance)) + 1)


def cut_delta(rate: float, steps: int, epsilon: float) -> float:
    """Return the delta that the samples cost that `most_drawn` cuts.

    Training whose samples are not cut differs from this with a probability of at most P = steps / 1e60. So if the one
    has a guarantee of epsilon and delta, the other has one of epsilon and delta + (1 + exp(epsilon)) P.
    """
    if rate >= 1:
        return 0.0
    return steps * math.exp(min(np.logaddexp(0.0, epsilon) - _RARE, _BIGGEST))
