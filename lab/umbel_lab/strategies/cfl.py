"""Clustered federated learning (Sattler, Müller and Samek, 2020): one model, which is split where clients disagree.

The paper's server tells every client its cluster. Here a client trains the hypothesis that fits it best, as always, so
the server need not remember clients, and clients outside a round have a model too. Releases are split, so the method
works only as far as they show the directions of updates: not if the noise is larger than the updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from logging import INFO
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from umbel.models.model import Model
from umbel.protocol.arrays import Labels, Matrix, Vectors, distances, mean_of
from umbel.protocol.errors import ConfigError
from umbel.protocol.log import log
from umbel.protocol.run_config import AUTO, RunConfig
from umbel.strategies.base import HypothesisStrategy
from umbel.strategies.group_privacy import nearest
from umbel.strategies.respawn import cosines

_LEAST = 2  # minimum releases of a part
_LONGEST = "cfl/longest"


@dataclass(frozen=True)
class SplitOptions:
    """Conditions for splitting a cluster.

    Attributes
    ----------
    eps1 : float
        Its training has converged: its mean update is shorter than this share of its longest.
    eps2 : float
        Its clients still move: its longest update is longer than this share of the run's longest.
    gamma : float
        Its two parts go in different directions: sqrt((1 - a) / 2) is larger than this, where a is the largest cosine
        between an update of the one and of the other. It is 1 for opposite directions, and .71 at a right angle.
    """

    eps1: Annotated[float, Field(gt=0)] = 0.4
    eps2: Annotated[float, Field(ge=0)] = 0.05
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.7


class ClusteredFL(HypothesisStrategy):
    """Begins with one hypothesis, and has at most as many as the run sets."""

    Options: ClassVar[type] = SplitOptions

    @property
    def first_hypotheses(self) -> int:
        """One."""
        return 1

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse a run in which nothing could be split."""
        if run.hypotheses == AUTO or self.hypotheses == 1:
            text = (
                f"strategy {run.strategy!r} splits a hypothesis by itself; set hypotheses to their maximum, 2 or more"
            )
            raise ConfigError(text, code="config.hypotheses")

    def assign(self, releases: Vectors, hypotheses: Matrix, choices: Labels | None) -> Labels:
        """Return the nearest hypothesis of each release."""
        return nearest(releases, hypotheses)

    def reshape(self, round: int, moved: Matrix, hypotheses: Matrix, releases: Vectors, labels: Labels) -> Matrix:
        """Return the hypotheses, with two for each that is split; the second part comes last."""
        clusters = [np.flatnonzero(labels == j) for j in range(len(hypotheses))]
        own = [distances(releases, *one).max(initial=0.0) for one in zip(hypotheses, clusters, strict=True)]
        longest = max(*own, float(self.state.get(_LONGEST, 0.0)))
        self.state[_LONGEST] = np.asarray(longest)
        following = list(moved)
        for j, mine in enumerate(clusters):
            torn = len(mine) >= 2 * _LEAST and self._is_torn(moved[j] - hypotheses[j], own[j], longest)
            if len(following) == self.hypotheses or not torn:
                continue
            second, gap = bipartition(releases, hypotheses[j], mine)
            if _LEAST <= second.sum() <= len(mine) - _LEAST and gap > self.options.gamma:
                following[j] = mean_of(releases, mine[~second])
                following.append(mean_of(releases, mine[second]))
                log(INFO, "round %d splits hypothesis %d: %d releases form hypothesis %d, of its %d in all",
                    round, j, second.sum(), len(following) - 1, len(mine))  # fmt: skip
        return np.stack(following)

    def _is_torn(self, mean: Matrix, own: float, longest: float) -> bool:
        """Return whether a cluster's clients move although its mean does not (the paper's criterion, with relative
        lengths).

        `mean` is its mean update (n,), and `own` and `longest` are the lengths of its longest and of the run's.
        """
        return bool(np.linalg.norm(mean) < self.options.eps1 * own and own > self.options.eps2 * longest)


def bipartition(
    vectors: Vectors, centre: Matrix | None = None, rows: Labels | None = None
) -> tuple[NDArray[np.bool_], float]:
    """Return the two parts of updates between which the largest cosine a is smallest.

    The updates are those of at least 2 vectors as in `umbel.strategies.respawn.cosines`. The first result is a mask
    (m,) of the part without the first client, the second is sqrt((1 - a) / 2).
    """
    alike = cosines(vectors, centre, rows)
    # These imports take a moment; runs of other strategies need not wait for them.
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    # Joining the two clusters that are most alike until two are left is single linkage.
    tree = linkage(squareform(1 - alike, checks=False), "single")
    parts = fcluster(tree, 2, "maxclust")
    second = parts != parts[0]
    if not second.any():
        return second, 0.0
    between = float(alike[second][:, ~second].max())
    return second, math.sqrt((1 - between) / 2)
