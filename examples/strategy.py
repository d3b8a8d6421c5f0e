"""Your own strategy: smaller steps in later rounds, so that the noise of many rounds averages out.

Algorithm 1 replaces a hypothesis by the mean of its releases. From its 20th round on, this one goes the part 20 / t of
the way in round t, as in stochastic approximation (Robbins and Monro, 1951), so that noise does not add up. A clip norm
that shrinks, which umbel plans by itself, does the same without it.
"""

import matplotlib.pyplot as plt
import numpy as np

import umbel
from umbel.strategies import GroupPrivacy


class Slowing(GroupPrivacy):
    """Group privacy whose steps shrink."""

    def combine(self, group, hypothesis, index):
        """Return the next hypothesis of releases (m, n) and the last one (n,)."""
        rounds = self.state[f"rounds-{index}"] = self.state.get(f"rounds-{index}", np.zeros(())) + 1
        return hypothesis + (group.mean(axis=0) - hypothesis) * np.minimum(1, 20 / rounds)


def main(picture="strategy.svg", seeds=range(2000, 2005), **settings):
    """Run both on hospital stays with a constant clip norm, draw the error by rounds, and return the runs of each."""
    noise = {"noise_multiplier": 20.0, "clip_norm": 0.1, "clip_norm_decay": 1.0, "choice_epsilon": 0.0}
    given = noise | {"hypotheses": 1, "rounds": 100, "clients_per_round": 200, "max_participations": 0} | settings
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    runs = {}
    for name in ("group-privacy", "strategy:Slowing"):
        runs[name] = [
            umbel.run("hospital-services", strategy=name, seed=seed, baselines=False, **given) for seed in seeds
        ]
        losses = np.array([run.history["loss"].to_numpy() for run in runs[name]])
        axes.plot(losses.mean(axis=0), label=name)
        axes.fill_between(range(losses.shape[1]), losses.min(axis=0), losses.max(axis=0), alpha=0.2)
    axes.set(xlabel="round", ylabel="RMSE, dollars", ylim=(0, 3000), title=f"Mean and range of {len(seeds)} seeds")
    axes.legend()
    figure.savefig(picture)
    return runs


if __name__ == "__main__":
    main()
