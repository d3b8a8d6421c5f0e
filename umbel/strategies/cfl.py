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
from umbel.protocol.arrays import Labels, Matrix, Vectors, mean_of
from umbel.protocol.errors import ConfigError
from umbel.protocol.flower import log
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
        if run.hypotheses == AUTO:
            text = f"strategy {run.strategy!r} splits hypotheses by itself; set hypotheses to their maximum number"
            raise ConfigError(text, code="config.hypotheses")
        if self.hypotheses == 1:
            text = f"strategy {run.strategy!r} with hypotheses = 1 is fedavg; set hypotheses to their maximum number"
            raise ConfigError(text, code="config.hypotheses")

    def assign(self, releases: Vectors, hypotheses: Matrix, choices: Labels | None) -> Labels:
        """Return the nearest hypothesis of each release."""
        return nearest(releases, hypotheses)

    def reshape(self, round: int, moved: Matrix, hypotheses: Matrix, releases: Vectors, labels: Labels) -> Matrix:
        """Return the hypotheses, with two for each that is split; the second part comes last."""
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
                log(INFO, "round %d splits hypothesis %d: %d releases form hypothesis %d, of its %d in all",
                    round, j, second.sum(), len(following) - 1, len(mine))  # fmt: skip
        return np.stack(following)

    def _is_torn(self, updates: Matrix, longest: float) -> bool:
        """Return whether a cluster's clients move although its mean does not (the paper's criterion, with relative
        lengths)."""
        if len(updates) < 2 * _LEAST:
            return False
        own = float(np.linalg.norm(updates, axis=1).max())
        mean = float(np.linalg.norm(updates.mean(axis=0)))
        return bool(mean < self.options.eps1 * own and own > self.options.eps2 * longest)


def bipartition(updates: Matrix) -> tuple[NDArray[np.bool_], float]:
    """Return the two parts of updates (m, n) between which the largest cosine a is smallest, for m of at least 2.

    The first result is a mask (m,) of the part without the first client, the second is sqrt((1 - a) / 2).
    """
    alike = cosines(updates)
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
