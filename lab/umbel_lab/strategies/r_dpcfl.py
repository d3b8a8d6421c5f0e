"""Clusters from the first round (R-DPCFL: Malekmohammadi, Taik and Farnadi, TMLR 2025).

The means of clusters of the first round's releases become the hypotheses. That uses only releases, so it costs no
privacy. It needs releases with little noise, as of all rows at once (a rate of 1), in a separate run from which
a longer one starts. The paper's server tells clients their clusters; here they train what fits them best, as always.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from scipy import special

from umbel.models.model import Model
from umbel.nodes.fleet import Fleet
from umbel.protocol.arrays import Labels, Matrix, Vectors, in_blocks
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import AUTO, RunConfig
from umbel.protocol.tasks import TrainingSpec
from umbel.strategies.base import NoOptions
from umbel.strategies.differences import noise_variance
from umbel.strategies.group_privacy import MAX_ITERATIONS, GroupPrivacy, nearest

CLUSTERS = "r-dpcfl/clusters"  # in the strategy's state: the cluster of each of the first releases
_STARTS, _CLOSE, _TINY = 50, 1e-9, 1e-12


class RDPCFL(GroupPrivacy):
    """One hypothesis, until a round has at least k releases; then k, as in group privacy."""

    Options: ClassVar[type] = NoOptions
    nodes: Fleet
    resizes: ClassVar[bool] = False  # a single hypothesis, in which there is no choice, becomes k

    @property
    def first_hypotheses(self) -> int:
        """One."""
        return 1

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse a run without clusters, and one whose releases have unknown noise."""
        if run.hypotheses == AUTO or self.hypotheses == 1:
            text = f"strategy {run.strategy!r} finds as many clusters as hypotheses says; set it to 2 or more"
            raise ConfigError(text, code="config.hypotheses")
        if run.protect.rows and run.optimizer != "sgd":
            text = f"strategy {run.strategy!r} must know the noise of a release; set optimizer = sgd, without options"
            raise ConfigError(text, code="config.row-noise")

    def reshape(self, round: int, moved: Matrix, hypotheses: Matrix, releases: Vectors, labels: Labels) -> Matrix:
        """Return the means of the clusters of the first releases; later the hypotheses `moved`."""
        if len(hypotheses) > 1 or len(releases) < self.hypotheses:
            return super().reshape(round, moved, hypotheses, releases, labels)
        k, noise = self.hypotheses, release_variance(self.asked["train"].task, releases.shape[1])
        shares = mixture(releases, k, noise)
        self.state[CLUSTERS] = shares.argmax(1)
        following = np.empty((k, releases.shape[1]))
        for columns, block in in_blocks(releases):
            start = hypotheses[:, columns]
            following[:, columns] = start + _means(shares, block - start)
        return following


def release_variance(task: TrainingSpec, n: int) -> float:
    """Return the variance of the noise on each of a release's n parameters, after plain steps, as far as known."""
    known = noise_variance(task, n) or 0.0
    if rows := task.row_privacy:
        known += rows.steps * (task.step_size * rows.noise_multiplier * rows.clip_norm / rows.batch) ** 2
    return known


def mixture(points: Vectors, k: int, noise: float) -> Matrix:
    """Return the probability (m, k) that each of m points (m, n), m >= k, belongs to each of k normal distributions.

    These have equal weights, and one variance in all directions, at least that of the `noise`. Expectation maximisation
    fits them in the first k - 1 principal axes, which hold all differences of k means.
    """
    products = np.zeros((len(points), len(points)))
    for _, block in in_blocks(points):
        centred = block - block.mean(0)
        products += centred @ centred.T
    values, axes = np.linalg.eigh(products)
    scores = axes[:, 1 - k :] * np.sqrt(values[1 - k :].clip(min=0))
    fits = [_fit(scores, start, max(noise, _TINY * float(scores.var()), _TINY**9)) for start in _starts(scores, k)]
    return max(fits, key=lambda fit: fit[0])[1]


def _fit(points: Matrix, centres: Matrix, least: float) -> tuple[float, Matrix]:
    """Return the log-likelihood of the distributions fitted from these means, up to a constant, and probabilities."""
    before, shares = -np.inf, np.eye(len(centres))[nearest(points, centres)]
    for _ in range(MAX_ITERATIONS):
        squares = np.square(points[:, None] - centres).sum(2)
        variance = max(least, float((shares * squares).sum()) / points.size)
        odds = -squares / (2 * variance)
        likelihood = float(special.logsumexp(odds, 1).sum() - points.size / 2 * np.log(variance))
        shares = special.softmax(odds, 1)
        if likelihood - before <= _CLOSE * abs(likelihood):
            break
        before, centres = likelihood, _means(shares, points)
    return likelihood, shares


def _starts(points: Matrix, k: int) -> list[Matrix]:
    """Return sets of k of the points: one, and then always the farthest from those before."""
    found = []
    for first in np.unique(np.linspace(0, len(points) - 1, _STARTS).astype(np.int64)):
        chosen, left = points[first][None], np.full(len(points), np.inf)
        while len(chosen) < k:
            left = np.minimum(left, np.square(points - chosen[-1]).sum(1))
            chosen = np.vstack([chosen, points[left.argmax()]])
        found.append(chosen)
    return found


def _means(shares: Matrix, points: Matrix) -> Matrix:
    """Return the means (k, n) of points (m, n), weighted by the columns of shares (m, k)."""
    means: Matrix = (shares / np.maximum(shares.sum(0), _TINY)).T @ points
    return means
