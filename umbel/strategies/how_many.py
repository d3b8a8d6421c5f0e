"""The number of hypotheses, chosen from the releases: ``hypotheses = "auto"``.

A run begins with more hypotheses than needed. After some rounds, those with hardly any releases are dropped, and those
that moved to nearly the same place are merged. All of this is computed from releases that exist anyway, so it adds no
cost. But until then, a client's open choice is among the larger number k: it reveals up to log2 k bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from logging import INFO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.arrays import Labels, Matrix
from umbel.protocol.errors import ConfigError
from umbel.protocol.log import log

if TYPE_CHECKING:
    from umbel.protocol.run_config import RunConfig

_WINDOW = 5  # number of last rounds whose releases count
_FEWEST = 0.05  # minimum share of these for a hypothesis
_NEAR = 0.3  # share of the way from a hypothesis's start; .25 to .4 do as well on the synthetic example
_START, _SUMS, _COUNTS, _CHOSEN = (f"how-many/{name}" for name in ("start", "sums", "counts", "chosen"))


@dataclass(frozen=True)
class HowMany:
    """Chooses the number of hypotheses once, after a round."""

    after: int

    @classmethod
    def for_run(cls, run: RunConfig) -> HowMany:
        """Return one that chooses after a third of a run's rounds; raise if choices are too random."""
        least = math.log(run.most_hypotheses - 1)
        if 0 < run.choice_epsilon < least:
            cause = f"choice-epsilon = {run.choice_epsilon:g} makes most choices random"
            fix = f"set hypotheses, or choice-epsilon to 0 or at least {math.ceil(100 * least) / 100:g}"
            raise ConfigError(f'hypotheses = "auto" sees no groups: {cause}; {fix}', code="config.choice-epsilon")
        return cls(max(1, run.rounds // 3))

    def choose(
        self, state: dict[str, NDArray[Any]], round: int, moved: Matrix, hypotheses: Matrix, labels: Labels
    ) -> Matrix:
        """Return the next hypotheses (l, n): those that moved (k, n), or in the round of the choice fewer.

        If the hypotheses change, the strategy's `state` is cleared; the other arguments are those of its `reshape`.
        """
        k = len(hypotheses)
        if _CHOSEN in state:
            return moved
        if _START not in state:
            state[_START] = hypotheses.astype(np.float32)
            state[_SUMS], state[_COUNTS] = np.zeros_like(hypotheses), np.zeros(k, np.int64)
        if round > self.after - _WINDOW:
            counts = np.bincount(labels, minlength=k)
            # The mean of a group represents its releases.
            state[_SUMS] = state[_SUMS] + counts[:, None] * moved
            state[_COUNTS] = state[_COUNTS] + counts
        if round < self.after:
            return moved
        kinds = merged(state[_SUMS], state[_COUNTS], state[_START].astype(np.float64))
        weights = state[_COUNTS].astype(np.float64)
        left = int(kinds.max()) + 1
        state.clear()
        state[_CHOSEN] = np.asarray(left)
        text = "%d of %d hypotheses remain after round %d: an open choice among them reveals %.3g bits instead of %.3g"
        log(INFO, text, left, k, round, math.log2(left), math.log2(k))
        shares = (kinds == np.arange(left)[:, None]) * weights
        following: Matrix = shares / shares.sum(axis=1, keepdims=True) @ moved
        return following


def merged(sums: Matrix, counts: Labels, start: Matrix) -> Labels:
    """Return for each hypothesis its number among the new ones, from 0; -1 if it is dropped.

    Hypotheses are merged by average linkage: the mean distance between two groups must be below three tenths of the
    longest way of a hypothesis from its `start` (k, n). The sums (k, n) and counts (k,) of the releases of the last
    rounds give the current positions.
    """
    kinds = np.full(len(counts), -1, np.int64)
    used = np.flatnonzero(counts >= max(1, _FEWEST * counts.sum()))
    centres = sums[used] / counts[used, None]
    way = float(np.linalg.norm(centres - start[used], axis=1).max())
    if len(used) == 1:
        kinds[used] = 0
        return kinds
    from scipy.cluster.hierarchy import fcluster, linkage  # the import takes a moment

    clusters = fcluster(linkage(centres, "average"), _NEAR * way, "distance")
    # Numbered in the order of their first hypotheses.
    _, first, number = np.unique(clusters, return_index=True, return_inverse=True)
    kinds[used] = np.argsort(np.argsort(first))[number]
    return kinds
