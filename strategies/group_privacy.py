"""Algorithm 1 of *Group privacy for personalized federated learning*."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strategies.base import HypothesisStrategy

MAX_ITERATIONS = 300


def nearest(points: NDArray[np.float64], centroids: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the nearest of `centroids` (k, n) to each of `points` (m, n), up to rounding."""
    # |p - c|^2 less |p|^2, which is the same for all c: a matrix product, with no copy of the points.
    distances = np.square(centroids).sum(axis=1) - 2 * (points @ centroids.T)
    labels: NDArray[np.int64] = distances.argmin(axis=1)
    return labels


def seeded_kmeans(points: NDArray[np.float64], centroids: NDArray[np.float64]) -> NDArray[np.int64]:
    """Cluster by Lloyd's iterations from given centroids (Algorithm 1, line 9).

    A centroid that attracts nobody stays where it is: moving it into another cluster, as
    library implementations do, would throw away a hypothesis that nobody happened to train.

    Parameters
    ----------
    points : ndarray, shape (m, n)
    centroids : ndarray, shape (k, n)

    Returns
    -------
    ndarray of int, shape (m,)
        The cluster of each point.
    """
    labels = nearest(points, centroids)
    for _ in range(MAX_ITERATIONS):
        # A matrix product reads the points once, without a copy of each cluster: models may be large.
        sizes = np.bincount(labels, minlength=len(centroids))
        shares = (labels == np.arange(len(centroids))[:, None]) / np.maximum(sizes, 1)[:, None]
        centroids = np.where(sizes[:, None] > 0, shares @ points, centroids)
        following = nearest(points, centroids)
        if np.array_equal(following, labels):
            break
        labels = following
    return labels


class GroupPrivacy(HypothesisStrategy):
    """k-means over the sanitised models, seeded with the hypotheses; unweighted averages."""

    def assign(
        self, releases: NDArray[np.float64], hypotheses: NDArray[np.float64], choices: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """Return the k-means cluster of each release."""
        return seeded_kmeans(releases, hypotheses)
