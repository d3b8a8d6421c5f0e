"""Your own clustering: a mixture of Gaussians in place of k-means, in ten lines.

The class works in umbel's runs, as here, and in the ServerApp of any Flower app: `Mixture().start(grid, ...)`.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.mixture import GaussianMixture

import umbel
from umbel.strategies import GroupPrivacy


class Mixture(GroupPrivacy):
    """Group privacy that clusters by a mixture of Gaussians, which begins at the hypotheses."""

    def assign(self, releases, hypotheses, choices):
        """Return the cluster (m,) of each release (m, n)."""
        if len(releases) < 2 * len(hypotheses):  # too few for variances
            return super().assign(releases, hypotheses, choices)
        mixture = GaussianMixture(len(hypotheses), covariance_type="spherical", means_init=hypotheses, random_state=0)
        return mixture.fit_predict(releases)


def main(picture="strategy.svg", seeds=range(4), **settings):
    """Run both on the synthetic data, draw the error by rounds, and return the runs of each."""
    given = {"noise_multiplier": 2.0, "choice_epsilon": 0.0, "rounds": 40, "max_participations": 0} | settings
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    runs = {}
    for name in ("group-privacy", "strategy:Mixture"):
        runs[name] = [umbel.run("synthetic", strategy=name, seed=seed, baselines=False, **given) for seed in seeds]
        losses = np.array([run.history["loss"].to_numpy() for run in runs[name]])
        axes.plot(losses.mean(axis=0), label=name)
        axes.fill_between(range(losses.shape[1]), losses.min(axis=0), losses.max(axis=0), alpha=0.2)
    axes.set(xlabel="rounds", ylabel="RMSE", ylim=(0, 6), title=f"Mean and range of {len(seeds)} seeds")
    axes.legend()
    figure.savefig(picture)
    return runs


if __name__ == "__main__":
    main()
