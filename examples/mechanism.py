"""Your own mechanism: Laplace noise on each coordinate, against noise on the vector as a whole.

Umbel's `laplace` clips an update's Euclidean norm. This one clips the sum of magnitudes, and adds independent noise.
Both cost a client the same pure epsilon; which one learns more depends on the data.
"""

import math

import matplotlib.pyplot as plt
import numpy as np

import umbel
from umbel.privacy.mechanisms import Mechanism
from umbel.privacy.mechanisms.base import each
from umbel.privacy.mechanisms.choice import RandomisedResponse
from umbel.protocol.release import quotient


class Coordinates(Mechanism):
    """Laplace noise of scale nu r on each number; updates are clipped to a sum of magnitudes of r."""

    name = "coordinates"

    def constrain(self, updates, radius):  # each of (m, n)
        return updates * np.minimum(1, radius / np.maximum(np.abs(updates).sum(axis=1, keepdims=True), 1e-300))

    def noise(self, sizes, radii, generators):
        noise = np.empty((len(radii), sum(sizes)))
        for row, source in enumerate(each(generators, len(noise))):
            noise[row] = source.standard_normal(sum(sizes)) * np.sqrt(-2 * np.log1p(-source.random(sum(sizes))))
        return noise * self.noise_multiplier * np.repeat(radii, sizes, axis=1)

    def deviation(self, n):  # of a number, at clip norm 1
        return math.sqrt(2) * self.noise_multiplier

    def pure(self, n, distance):  # epsilon of updates so many clip norms apart
        return quotient(distance, self.noise_multiplier)

    def loss(self, n, distance):  # a choice of two has the largest of this epsilon
        return RandomisedResponse(distance / self.noise_multiplier, 2)


def main(picture="mechanism.svg", seeds=range(2000, 2003), epsilons=(1, 2, 4), **settings):
    """Plan and run both, draw the error by epsilon, and return errors (mechanism, epsilon, seed)."""
    errors = np.array([[[umbel.run("hospital-services", epsilon=epsilon, delta=0, mechanism=name, seed=seed,
                                   baselines=False, **settings).last_loss for seed in seeds] for epsilon in epsilons]
                       for name in ("laplace", "mechanism:Coordinates")])  # fmt: skip
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name, found in zip(("laplace", "coordinates"), errors, strict=True):
        axes.errorbar(epsilons, found.mean(axis=1), found.std(axis=1), label=name, capsize=3)
    axes.set(xlabel="pure epsilon", ylabel="RMSE, dollars", xscale="log", title="Hospital stays")
    axes.set_xticks(epsilons, labels=map(str, epsilons))
    axes.minorticks_off()
    axes.legend()
    figure.savefig(picture)
    return errors


if __name__ == "__main__":
    main()
