"""Algorithm 1 of *Group privacy for personalized federated learning*: k-means over the releases.

`umbel.strategies.base` calls `assign` here in each round, and averages each cluster.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from umbel.protocol.arrays import Labels, Matrix, Vectors, in_blocks
from umbel.protocol.errors import ConfigError
from umbel.strategies.base import HypothesisStrategy

if TYPE_CHECKING:
    from umbel.models.model import Model
    from umbel.protocol.run_config import RunConfig

MAX_ITERATIONS = 300


def nearest(points: Vectors, centroids: Matrix) -> Labels:
    """Return the nearest of `centroids` (k, n) to each of `points` (m, n), up to rounding."""
    # |p - c|^2 minus |p|^2, which is the same for all c: a matrix product, without a copy of the points.
    products = np.zeros((len(points), len(centroids)))
    for columns, block in in_blocks(points):
        products += block @ centroids[:, columns].T
    distances = np.square(centroids).sum(axis=1) - 2 * products
    labels: Labels = distances.argmin(axis=1)
    return labels


def seeded_kmeans(points: Vectors, centroids: Matrix) -> Labels:
    """Cluster by Lloyd's iterations from given centroids (Algorithm 1, line 9).

    A centroid without points stays where it is.

    Parameters
    ----------
    points, centroids : ndarray, shapes (m, n) and (k, n)

    Returns
    -------
    ndarray of int, shape (m,)
    """
    if len(centroids) == 1:
        return np.zeros(len(points), np.int64)
    labels = nearest(points, centroids)
    for _ in range(MAX_ITERATIONS):
        # A matrix product reads the points once, without a copy of each cluster: models may be large.
        sizes = np.bincount(labels, minlength=len(centroids))
        shares = (labels == np.arange(len(centroids))[:, None]) / np.maximum(sizes, 1)[:, None]
        centroids, before = np.empty_like(centroids), centroids
        for columns, block in in_blocks(points):
            centroids[:, columns] = np.where(sizes[:, None] > 0, shares @ block, before[:, columns])
        following = nearest(points, centroids)
        if np.array_equal(following, labels):
            break
        labels = following
    return labels


def relocating_kmeans(points: Vectors, centroids: Matrix) -> Labels:
    """Cluster as `seeded_kmeans`, but move a centroid without points, as scikit-learn does.

    It moves to the point that is furthest from its own centroid. If there are fewer points than centroids, those
    without points stay.
    """
    if len(centroids) == 1 or len(points) < len(centroids):
        return seeded_kmeans(points, centroids)
    # Together they take a second to import, and only this uses them.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    kmeans = KMeans(len(centroids), init=centroids, n_init=1, max_iter=MAX_ITERATIONS, tol=0)
    # Threads would add up in any order, and 32 bits round differently wherever the points lie.
    with _threads().limit(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # clients without an update release equal points
        labels: Labels = kmeans.fit(points.astype(np.float64)).labels_.astype(np.int64)
    return labels


@lru_cache
def _threads() -> Any:
    """Return the control of the threads of this process's libraries, which takes 10 ms to find them."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@dataclass(frozen=True)
class GroupOptions:
    """Options for hypotheses that no client trains.

    Attributes
    ----------
    empty : str
        In k-means, the centre of an empty cluster stays where it is ("stay"), or moves to a release far from its own
        centre, as in scikit-learn ("relocate"). The paper does not say which it used.
    respawn : int
        After so many rounds in a row without a release, a hypothesis becomes half of the largest group
        (`umbel.strategies.respawn`); 0 for never, as in the paper.
    """

    empty: Literal["stay", "relocate"] = "stay"
    respawn: int = 0

    def __post_init__(self) -> None:
        if self.respawn < 0:
            raise ValueError(f"respawn is a number of rounds, or 0 for never, not {self.respawn}")


class GroupPrivacy(HypothesisStrategy):
    """k-means over the sanitised models, seeded with the hypotheses; unweighted averages."""

    Options: ClassVar[type] = GroupOptions
    resizes = False

    @property
    def _respawn(self) -> int:
        # The options of a derived strategy may lack it, as they may lack `empty`.
        return int(getattr(self.options, "respawn", 0))

    def assign(self, releases: Vectors, hypotheses: Matrix, choices: Labels | None) -> Labels:
        """Return the k-means cluster of each release."""
        if getattr(self.options, "empty", "stay") == "relocate":
            return relocating_kmeans(releases, hypotheses)
        return seeded_kmeans(releases, hypotheses)

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse to drop and to respawn hypotheses in the same run."""
        if self._respawn and self.how_many is not None:
            text = 'hypotheses = "auto" drops hypotheses that respawn brings back; leave one of them out'
            raise ConfigError(text, code="config.hypotheses")

    def reshape(self, round: int, moved: Matrix, hypotheses: Matrix, releases: Vectors, labels: Labels) -> Matrix:
        """Return the next hypotheses, some of which may be respawned."""
        moved = super().reshape(round, moved, hypotheses, releases, labels)
        if not self._respawn:
            return moved
        from umbel.strategies.respawn import respawned  # few runs need it, or SciPy

        return respawned(self.state, self._respawn, round, moved, hypotheses, releases, labels)
