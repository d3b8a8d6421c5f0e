"""The formula figures of umbel's gate, from the noise that umbel's own code adds; and its gate as targets."""

from math import erfc, exp, sqrt

import numpy as np

import umbel
from umbel.privacy.mechanisms import Gaussian, Laplace
from umbel.protocol.simulated import in_process


def epsilon(mu, delta=1e-5):  # of Gaussian noise at a distance of mu deviations (Balle and Wang, 2018)
    low, high = 0.0, 500.0
    for _ in range(100):
        middle = (low + high) / 2
        near, far = (erfc((middle / mu + side * mu / 2) / sqrt(2)) / 2 for side in (-1, 1))
        low, high = (middle, high) if near - exp(middle) * far > delta else (low, middle)
    return high


def gate(**options):
    found = umbel.Gate(clip_norm=1.0, budget=2.0, **options)

    def mod(msg, context, call_next):
        with in_process():
            return found(msg, context, call_next)

    mod.epsilon, mod.delta, mod.clip_norm = 2.0, options.get("delta", 0.0), 1.0
    return mod


def gaussian():
    return gate(noise_multiplier=8.0, mechanism="gaussian", delta=1e-5)


def laplace():
    return gate(noise_multiplier=8.0, mechanism="laplace")


if __name__ == "__main__":
    sources = iter([np.random.default_rng(0), np.random.default_rng(1)])
    noise = Gaussian(8.0).noise([100_000], np.ones((1, 1)), sources)
    print("gaussian", epsilon(2.0 / noise.std()))  # two updates are two clip norms apart
    noise = Laplace(8.0).noise([100_000], np.ones((1, 1)), sources)
    print("laplace", 2.0 * 100_000 / np.linalg.norm(noise) * 8 / 100_000)  # for 8 values
