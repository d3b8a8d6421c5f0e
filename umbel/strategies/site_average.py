"""Averages of sites' releases: sums over clients that trust their site, with noise once for each site."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord
from pydantic import Field

from umbel.models.model import Model
from umbel.nodes.fleet import Fleet
from umbel.privacy import channels
from umbel.protocol.arrays import Labels, Matrix, flatten
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping, ReleaseBy
from umbel.protocol.releases import Sums
from umbel.protocol.run_config import RunConfig
from umbel.strategies.base import HypothesisStrategy, Outcome, moved_to


@dataclass(frozen=True)
class Explore:
    """Options of `SiteAverage`.

    Without exploring, a hypothesis that suits no client best at first is never trained, and all clients end up with
    one.

    Attributes
    ----------
    explore : float
        Share of a site's clients that train a hypothesis drawn at random.
    rounds : int
        Number of first rounds with exploring.
    """

    explore: Annotated[float, Field(ge=0, le=1)] = 0.3
    rounds: int = 8


class SiteAverage(HypothesisStrategy):
    """Each client trains the hypothesis that fits it best, and a hypothesis moves by the mean of its clients' updates.

    This is iterative federated clustering (Ghosh et al., 2020), but the server reads neither updates nor choices. From
    each site it gets, with noise, the sum of the updates of each hypothesis and how many clients trained it. Every
    client counts once, at any site.
    """

    Options: ClassVar[type] = Explore
    release_by: ClassVar[ReleaseBy] = ReleaseBy.SITE
    nodes: Fleet

    def decisions(self, round: int) -> dict[str, Any]:
        """Return what the strategy decides of a task; in the first rounds some clients try another hypothesis."""
        explores = self.hypotheses > 1 and round <= self.options.rounds
        return {"release_by": str(self.release_by), "explore": float(self.options.explore) if explores else 0.0}

    def check(self, run: RunConfig, model: Model) -> None:
        """Refuse runs for which a site cannot make one release."""
        if self.how_many is not None:
            text = f"strategy {run.strategy!r} cannot choose the number of hypotheses; set hypotheses"
            raise ConfigError(text, code="config.hypotheses")
        if run.clipping.mode is not Clipping.PUBLIC:
            text = f'strategy {run.strategy!r} works only with clipping = "public", not "{run.clipping.mode}"'
            raise ConfigError(text, code="config.clipping")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next hypotheses and the round's counts, from the sums in the replies."""
        return self.conclude(self.learn_sums(server_round, self.nodes.read(self.asked[MessageType.TRAIN], replies)))

    def learn_sums(self, round: int, sums: Sums) -> Outcome:
        """Move each hypothesis by the mean of its clients' updates; one with (nearly) no clients stays unchanged."""
        sent, shares, following = self.sent, np.zeros(self.hypotheses), None
        if len(sums.clients) >= max(1, self.min_releases):
            shares = self.shares(sums)
            moved = flatten(sent)
            for j in np.flatnonzero(shares >= self.least(len(sums.counts))).tolist():
                moved[j] += sums.sums[:, j].sum(axis=0, dtype=np.float64) / shares[j]
            following = moved_to(moved, sent, round)
        groups = np.full(len(sums.clients), -1, np.int64)
        return Outcome(round, sums.clients, groups, _whole(shares), None, sums.asked, sums.lost_nodes, following)

    def shares(self, sums: Sums) -> Matrix:
        """Return about how many of the participating clients trained each hypothesis (k,); they add up to all."""
        counts = sums.counts.sum(axis=0)
        total, clients = float(counts.sum()), len(sums.clients)
        # A total near 0 is noise, and too small to divide by.
        return counts / total * clients if total >= 1 else np.full(self.hypotheses, clients / self.hypotheses)

    def least(self, sites: int) -> float:
        """Return the minimum number of clients for a hypothesis to move: one, and at least the deviation of the counts'
        noise."""
        if self.hypotheses == 1:
            return 1.0
        task = self.asked[MessageType.TRAIN].task
        return max(1.0, channels.load(task.channel).count_deviation(task) * math.sqrt(sites))


def _whole(shares: Matrix) -> Labels:
    """Round numbers (k,) with an integer sum to integers with the same sum."""
    counts = np.floor(shares).astype(np.int64)
    left = round(float(shares.sum())) - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[:left]] += 1
    return counts
