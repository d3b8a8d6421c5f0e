"""Clustered federated learning (Sattler, Müller and Samek, 2020): one model, which is split where clients disagree.

The paper's server tells every client which cluster it is in. Here a client trains the hypothesis that fits it
best, as always, so the server need not remember anybody, and clients that took no part have a model too.
What is split are the releases, so that it works as far as these show in which direction clients went: not
under noise that is larger than their updates.
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
from umbel.protocol.arrays import Vectors, mean_of
from umbel.protocol.errors import ConfigError
from umbel.protocol.flower import log
from umbel.protocol.run_config import AUTO, RunConfig
from umbel.strategies.base import HypothesisStrategy
from umbel.strategies.cosines import cosines
from umbel.strategies.group_privacy import nearest

_LEAST = 2  # releases of a part
_LONGEST = "cfl/longest"


@dataclass(frozen=True)
class SplitOptions:
    """When a cluster is split.

    Attributes
    ----------
    eps1 : float
        Its training is over, as its mean update is shorter than this share of its longest.
    eps2 : float
        And yet clients still move, as its longest is longer than this share of the run's longest.
    gamma : float
        And its two parts go different ways: sqrt((1 - a) / 2) is larger than this, where a is the largest cosine
        between an update of the one and of the other. It is 1 where they are opposite, and .71 at a right angle.
    """

    eps1: Annotated[float, Field(gt=0)] = 0.4
    eps2: Annotated[float, Field(ge=0)] = 0.05
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.7


class ClusteredFL(HypothesisStrategy):
    """Begins with one hypothesis, and has at most as many as the run says."""

    Options: ClassVar[type] = SplitOptions

    @property
    def first_hypotheses(self) -> int:
        """One."""
        return 1

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse a run that could split nothing."""
        if run.hypotheses == AUTO:
            raise ConfigError(
                f"strategy {run.strategy!r} splits by itself; set hypotheses to the most that there may be",
                code="config.hypotheses",
            )
        if self.hypotheses == 1:
            raise ConfigError(
                f"strategy {run.strategy!r} with hypotheses = 1 is fedavg; set the most that there may be",
                code="config.hypotheses",
            )

    def assign(
        self, releases: Vectors, hypotheses: NDArray[np.float64], choices: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        """Return the hypothesis that each release is nearest to."""
        return nearest(releases, hypotheses)

    def reshape(
        self,
        round: int,
        moved: NDArray[np.float64],
        hypotheses: NDArray[np.float64],
        releases: Vectors,
        labels: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Return the hypotheses with those in two that are to be split; the second part comes last."""
        updates = releases - hypotheses[labels]
        lengths = np.linalg.norm(updates, axis=1)
        longest = max(float(lengths.max()), float(self.state.get(_LONGEST, 0.0)))
        self.state[_LONGEST] = np.asarray(longest)
        following = list(moved)
        for j in range(len(hypotheses)):
            mine = np.flatnonzero(labels == j)
            if len(following) == self.hypotheses or not self._is_torn(updates[mine], longest):
                continue
            second, gap = bipartition(updates[mine])
            if _LEAST <= second.sum() <= len(mine) - _LEAST and gap > self.options.gamma:
                following[j] = mean_of(releases, mine[~second])
                following.append(mean_of(releases, mine[second]))
                log(INFO, "round %d splits hypothesis %d: %d, as hypothesis %d, of its %d releases go another way",
                    round, j, second.sum(), len(following) - 1, len(mine))  # fmt: skip
        return np.stack(following)

    def _is_torn(self, updates: NDArray[np.float64], longest: float) -> bool:
        """Return whether a cluster's clients move and it does not (the paper's criterion, with lengths as shares)."""
        if len(updates) < 2 * _LEAST:
            return False
        own = float(np.linalg.norm(updates, axis=1).max())
        mean = float(np.linalg.norm(updates.mean(axis=0)))
        return bool(mean < self.options.eps1 * own and own > self.options.eps2 * longest)


def bipartition(updates: NDArray[np.float64]) -> tuple[NDArray[np.bool_], float]:
    """Return the two parts between which the largest cosine is smallest, and how far they are apart.

    Parameters
    ----------
    updates : ndarray, shape (m, n)
        Of at least two clients.

    Returns
    -------
    second : ndarray of bool, shape (m,)
        Who is in the part without the first client.
    gap : float
        sqrt((1 - a) / 2) for the largest cosine a between the parts.
    """
    alike = cosines(updates)
    # They take a moment, for which runs of other strategies need not wait.
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
