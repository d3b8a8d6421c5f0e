"""The formula figures of pfl-research's mechanisms, from the noise that its own code adds; and both as targets."""

from math import erfc, exp, sqrt

import numpy as np
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.laplace_mechanism import LaplaceMechanism
from pfl.stats import MappedVectorStatistics


def epsilon(mu, delta=1e-5):  # of Gaussian noise at a distance of mu deviations (Balle and Wang, 2018)
    low, high = 0.0, 500.0
    for _ in range(100):
        middle = (low + high) / 2
        near, far = (erfc((middle / mu + side * mu / 2) / sqrt(2)) / 2 for side in (-1, 1))
        low, high = (middle, high) if near - exp(middle) * far > delta else (low, middle)
    return high


class Released:
    """The release of one client's update, as a cohort."""

    def __init__(self, mechanism, epsilon, delta):
        self.mechanism, self.epsilon, self.delta, self.clip_norm = mechanism, epsilon, delta, 1.0
        self.clip_order = mechanism._order

    def __call__(self, update: dict):
        clipped, _ = self.mechanism.constrain_sensitivity(MappedVectorStatistics(update))
        return dict(self.mechanism.add_noise(clipped, cohort_size=1)[0].items())


def gaussian():
    return Released(GaussianMechanism.construct_single_iteration(1.0, epsilon=1.0, delta=1e-5), 1.0, 1e-5)


def laplace():
    return Released(LaplaceMechanism(1.0, epsilon=1.0), 1.0, 0.0)


if __name__ == "__main__":
    zeros = {"w": np.zeros(100_000)}
    print("GaussianMechanism", epsilon(2.0 / gaussian()(zeros)["w"].std()))  # two updates are two clip norms apart
    print("LaplaceMechanism", 2.0 / np.abs(laplace()(zeros)["w"]).mean())  # so too by the sum of magnitudes
