"""Group privacy with some hostile clients: their releases do not count for more than the others'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from umbel.protocol.arrays import Labels, Matrix, Vectors, distances, in_blocks
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import exact
from umbel.strategies.group_privacy import GroupPrivacy, nearest

if TYPE_CHECKING:
    from umbel.models.model import Model
    from umbel.protocol.run_config import RunConfig

_LLOYD = 20  # iterations; centres other than means may never settle
_WEISZFELD, _TOLERANCE = 50, 1e-6
# In median distances of the releases from the hypotheses: few honest releases are farther.
_REACH = 2.0


@dataclass(frozen=True)
class HostileOptions:
    """The share of a round's releases that may be hostile; all of them may lie in one group."""

    hostile: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.hostile < 0.5:
            raise ValueError(f"hostile is a share from 0 to below .5, not {self.hostile:g}")


class Robust(GroupPrivacy):
    """k-means and then a centre of each group, as in group privacy, with three limits on hostile clients.

    A release counts as if it were at most twice as far from a hypothesis as the median release is from the nearest one
    (clipping around a centre: Karimireddy, He and Jaggi, 2021), so no parameter of a hypothesis moves further in a
    round. A group that may consist only of hostile clients leaves its hypothesis unchanged, so a few releases far away
    do not capture one. The centre of any other group is robust, in k-means as well.
    """

    Options: ClassVar[type] = HostileOptions

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._few, self._reach = 0, np.inf

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse a share with which groups of equal size would all stay unchanged."""
        share, k = self.options.hostile, self.hypotheses
        if share * k >= 1:
            text = f"strategy: hostile = {share:g} is no less than the share of each of {k} groups"
            raise ConfigError(f"{text}; set it below {1 / k:.3g}", code="config.option-value")

    def assign(self, releases: Vectors, hypotheses: Matrix, choices: Labels | None) -> Labels:
        """Return the cluster of each release, by Lloyd's iterations with the centres from `combine`."""
        labels = nearest(releases, hypotheses)
        self._few = int(exact(self.options.hostile) * len(releases))
        away = np.zeros(len(releases))
        for j in np.unique(labels):
            rows = np.flatnonzero(labels == j)
            away[rows] = distances(releases, hypotheses[j], rows)
        self._reach = _REACH * float(np.median(away))
        for _ in range(_LLOYD if len(hypotheses) > 1 else 0):
            centres = hypotheses.copy()
            for j in np.unique(labels).tolist():
                centres[j] = self.combine(releases[labels == j], hypotheses[j], j)
            following = nearest(releases, centres)
            if np.array_equal(following, labels):
                break
            labels = following
        return labels

    def combine(self, group: Matrix, hypothesis: Matrix, index: int) -> Matrix:
        """Return the hypothesis moved by the centre of the group's steps, or unchanged."""
        if len(group) <= self._few:
            return hypothesis
        steps, lengths = group - hypothesis, distances(group, hypothesis)[:, None]
        steps *= np.divide(self._reach, lengths, out=np.ones_like(lengths), where=lengths > self._reach)
        return hypothesis + self.centre(steps, self._few)

    def centre(self, steps: Matrix, few: int) -> Matrix:
        """Return the centre (n,) of points (g, n), at least one, of which `few` may be hostile."""
        raise NotImplementedError


class TrimmedMean(Robust):
    """The mean of each parameter without its largest and smallest values (Yin et al., 2018).

    At each end, as many are left out as may be hostile, or nearly half of a small group.
    """

    def centre(self, steps: Matrix, few: int) -> Matrix:
        """Return the trimmed mean."""
        trim = min(few, (len(steps) - 1) // 2)
        mean = np.empty(steps.shape[1])
        for columns, block in in_blocks(steps):
            mean[columns] = np.sort(block, axis=0)[trim : len(steps) - trim].mean(axis=0)
        return mean


class GeometricMedian(Robust):
    """The point with the smallest sum of distances to the releases (Pillutla, Kakade and Harchaoui, 2022).

    Weiszfeld's iterations consist of matrix products, so they suit models that are too large to sort.
    """

    def centre(self, steps: Matrix, few: int) -> Matrix:
        """Return the geometric median."""
        centre: Matrix = steps.mean(axis=0)
        # A distance below this counts as 0: the weights stay finite if the median is one of the points.
        least = 1e-9 * float(distances(steps, np.zeros_like(centre)).max()) or 1.0
        for _ in range(_WEISZFELD):
            weights = 1 / np.maximum(distances(steps, centre), least)
            following = weights @ steps / weights.sum()
            moved, centre = float(np.linalg.norm(following - centre)), following
            if moved <= _TOLERANCE * max(least, float(np.linalg.norm(centre))):
                break
        return centre
