"""An example of a channel from outside umbel: a site releases the mean update of its clients.

This file and a name in `umbel.protocol.release.CHANNELS` are all that it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import Message, MetricRecord

from umbel.privacy import channels, mechanisms
from umbel.privacy.accounting.guarantee import site_release
from umbel.privacy.channels import Flags, Ids, Outgoing, flags_in, released_record
from umbel.privacy.channels.client import updates_in
from umbel.privacy.mechanisms.randomness import noise_sources
from umbel.privacy.mechanisms.sanitise import clip
from umbel.protocol.arrays import Arrays, Labels, flatten
from umbel.protocol.asked import Asked, read_replies
from umbel.protocol.release import Release
from umbel.protocol.releases import Sums
from umbel.protocol.tasks import TrainingSpec
from umbel.strategies.site_average import SiteAverage

NAME = "mean"


@dataclass(frozen=True)
class Mean(Outgoing):
    """The mean update of a site's clients."""

    mean: Any = None

    def records(self) -> Mapping[str, Any]:
        record = MetricRecord({"update": self.mean.tolist()})
        return {NAME: record, "released": released_record(self.paid)}


@dataclass(frozen=True)
class MeanSanitiser:
    place: channels.Place
    task: TrainingSpec
    start: Any
    fewest: ClassVar[int] = 2
    explore: ClassVar[float] = 0.0

    @classmethod
    def of(cls, place: channels.Place, hypotheses: Arrays, task: TrainingSpec) -> MeanSanitiser:
        return cls(place, task, flatten(hypotheses))

    @property
    def release(self) -> Release:
        return Means.price(self.task.release(self.start.size, 1, self.task.clip_norm))

    def leave(self, clients: Ids, results: Arrays, chosen: Labels, paid: Flags) -> Mean:
        updates = updates_in(results, slice(None), self.start[chosen])
        total = clip(updates, self.task.clip_norm).sum(axis=0)
        if self.task.noise_multiplier:
            [source] = noise_sources(self.place.seed, self.task.round, [self.place.site.first], NAME)
            radius = np.array([[self.task.clip_norm]])
            mechanism = mechanisms.load(self.task.mechanism)(self.task.noise_multiplier)
            total += mechanism.noise([total.size], radius, iter([source]))[0]
        return Mean(paid, mean=total / len(clients))


class Means(channels.Channel):
    sanitiser = MeanSanitiser

    @staticmethod
    def price(release: Release) -> Release:
        return site_release(release)

    @staticmethod
    def rows(k: int, clients: int) -> int:
        return 1

    def read(self, asked: Asked, replies: Iterable[Message]) -> Sums:
        def part(node: int, reply: Message) -> tuple[Any, Any]:
            mean = np.array(reply.content.metric_records[NAME]["update"])
            mine = asked.positions[node]
            return mean.reshape(asked.hypotheses.matrix.shape), mine[flags_in(reply.content, len(mine))]

        found = read_replies(asked, replies, part)
        counts = np.array([[float(len(mine))] for _, mine in found.values()])
        sums = np.array([mean * len(mine) for mean, mine in found.values()])
        clients = np.sort(np.concatenate([mine for _, mine in found.values()]))
        lost = len(asked.positions) - len(found)
        return Sums(sums, counts, asked.clients[clients], len(asked.clients), lost, clients[:0])


class MeanAverage(SiteAverage):
    """A strategy that asks for it."""

    release_by: ClassVar[Any] = NAME
