"""The channel of a site's sums: the site adds up its clients' updates by hypothesis, with noise once.

Clients that trust their site release with less noise together. The server leaves out sums that are longer than valid
updates allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from umbel.privacy import channels, mechanisms
from umbel.privacy.accounting.guarantee import site_release
from umbel.privacy.channels import Flags, Ids, Outgoing, Place, Sanitiser, answers_training, flags_in, released_record
from umbel.privacy.channels.client import (
    RARE,
    ClientSanitiser,
    blocks,
    checked_rows,
    concatenated,
    mechanism_of,
    rounding,
    spacing,
    updates_in,
)
from umbel.privacy.mechanisms.base import Matrix, Mechanism, NoiseSource
from umbel.privacy.mechanisms.randomness import noise_sources
from umbel.privacy.mechanisms.sanitise import (
    LARGEST,
    NOISE_STEPS,
    check_noise,
    draw_noise,
    resolution,
    round_to_grid,
    within,
)
from umbel.protocol.arrays import Arrays, Labels, Vectors, distances, flatten, unflatten
from umbel.protocol.asked import Asked, read_replies
from umbel.protocol.errors import ProtocolError, Refused
from umbel.protocol.log import log
from umbel.protocol.records import pack, record_in, unpack
from umbel.protocol.release import LEAST_CLIP_NORM, Release
from umbel.protocol.releases import Sums
from umbel.protocol.tasks import TrainingSpec

# --- at a site


@dataclass(frozen=True)
class SiteReleased(Outgoing):
    r"""The sums of charged clients' updates by hypothesis, each (k, \*shape), and how many trained each."""

    counts: Sequence[float] = field(default_factory=list)

    def records(self) -> Mapping[str, Any]:
        """Return sums and counts, and the flags of the clients in them."""
        return {"arrays": pack(self.arrays), "released": released_record(self.paid, counts=list(self.counts))}


@dataclass(frozen=True)
class SiteSanitiser(Sanitiser):
    """A site's sanitisation of its clients' updates together, for a task that asks for sums.

    If the clients of a site trust it, the site sums their clipped updates by the hypothesis that each chose, and counts
    them. Noise hides a change of any one client's whole data, its choice included
    (`umbel.privacy.accounting.guarantee`). With one hypothesis the count needs no noise: it is public who took part.

    It works like `ClientSanitiser`, but the radius is raised only to the site's floor.
    `count_radius` is the radius of each count, in clients; 0 if counts get no noise.
    """

    place: Place
    task: TrainingSpec
    hypotheses: Matrix
    mechanism: Mechanism | None
    radius: float
    count_radius: float

    @classmethod
    def of(cls, place: Place, hypotheses: Arrays, task: TrainingSpec) -> SiteSanitiser:
        """See `umbel.privacy.channels.Sanitiser.of`."""
        ClientSanitiser.check_hidden(place, task)
        everything = flatten(hypotheses)
        (k, n), radius = everything.shape, max(task.clip_norm, place.site.policy.clipping.floor)
        mechanism, count_radius = None, 0.0
        if task.noise_multiplier > 0:
            mechanism = mechanisms.load(task.mechanism)(task.noise_multiplier)
            check_noise(mechanism, n, radius)
            if k > 1:
                count_radius = mechanism.count_radius(task.choice_epsilon)
                check_noise(mechanism, 1, count_radius)
        sanitiser = cls(place, task, everything, mechanism, radius, count_radius)
        if mechanism is not None and not place.site.simulated:
            sanitiser._check_spans(mechanism)
        return sanitiser

    @property
    def fewest(self) -> int:
        """Fewer charged clients than these release nothing."""
        least: int = self.place.site.policy.min_clients
        return least

    @cached_property
    def release(self) -> Release:
        """The release with which each participating client is charged."""
        k, n = self.hypotheses.shape
        return SiteSums.price(self.task.release(n, k, self.radius))

    @property
    def explore(self) -> float:
        """As the task says: the noise on the counts hides each choice, and exploring only helps learning."""
        return self.task.explore

    def leave(self, clients: Ids, results: Arrays, chosen: Labels, paid: Flags) -> SiteReleased:
        """Return what leaves of charged clients together."""
        sources = noise_sources(self.place.seed, self.task.round, [self.place.site.first], "site")
        sums, counts = self.sanitised(results, chosen, sources)
        return SiteReleased(paid, sums, counts=counts)

    def sanitised(self, trained: Arrays, chosen: Labels, sources: Iterator[NoiseSource]) -> tuple[Arrays, list[float]]:
        r"""Return sums (k, \*shape) of the updates of charged clients, and their counts (k,), by hypothesis.

        `sources` has one element, for all noise of the release.
        """
        k, n = self.hypotheses.shape
        sums, counts = self.summed(trained, chosen)
        if self.mechanism is not None:
            counted = k if self.count_radius else 0
            radii = np.array([[self.radius] * k + [self.count_radius] * counted])
            drawn = draw_noise(self.mechanism, [n] * k + [1] * counted, radii, sources)[0]
            if next(sources, None) is not None:
                raise ValueError("a site's release has one source of noise")
            (of_sums, finest), (of_counts, finest_count) = self._deviations(self.mechanism)
            sums += drawn[: k * n].reshape(k, n)
            sums = round_to_grid(sums, of_sums, finest)
            if counted:
                counts = round_to_grid(counts + drawn[k * n :], of_counts, finest_count)
        np.clip(sums, -LARGEST, LARGEST, out=sums)
        return unflatten(sums, trained), counts.tolist()

    def summed(self, trained: Arrays, chosen: Labels) -> tuple[Matrix, NDArray[np.float64]]:
        """Return the sums (k, n) of updates within the radius and the counts (k,), both without noise."""
        k, n = self.hypotheses.shape
        sums = np.zeros((k, n))
        for block in blocks(len(chosen), n):
            mine = chosen[block]
            updates = updates_in(trained, block, self.hypotheses[mine])
            inside = within(self.mechanism, updates, self.radius)
            if len(mine) == 1:  # a large model
                sums[mine[0]] += inside[0]
            else:
                sums += (mine == np.arange(k)[:, None]) @ inside
        return sums, np.bincount(chosen, minlength=k).astype(np.float64)

    def _deviations(self, mechanism: Mechanism) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return for sums and for counts the deviation of the noise, and the spacing of the numbers that travel.

        That is the spacing at the largest possible number, by public values only; counts travel in 64 bits.
        """
        n, clients = self.hypotheses.shape[1], len(self.task.clients)
        return (
            (mechanism.deviation(n) * self.radius, resolution(np.array([clients * self.radius]))),
            (mechanism.deviation(1) * self.count_radius, float(np.spacing(float(clients)))),
        )

    def _check_spans(self, mechanism: Mechanism) -> None:
        """Raise if the noise spans too few steps of the numbers that travel: a larger radius would not help."""
        if any(0 < noise < NOISE_STEPS * finest for noise, finest in self._deviations(mechanism)):
            raise Refused(
                f"noise multiplier {mechanism.noise_multiplier:g} is too small for sums of {len(self.task.clients)} "
                "clients, whose largest possible values are rounded too coarsely for it; ask for more noise or fewer "
                "clients",
                code="refused.noise-out-of-range",
            )


# --- at the server


def sums_in(content: RecordDict, asked: int) -> tuple[Arrays, NDArray[np.float64], Flags]:
    """Check and return a site's sums, its counts, and a flag for each asked client."""
    flags, arrays = flags_in(content, asked), unpack(record_in(content, "arrays", ArrayRecord))
    counts = np.asarray(record_in(content, "released", MetricRecord).get("counts", ()), np.float64)
    if counts.shape != (len(next(iter(arrays.values()))),) or not np.isfinite(counts).all():
        raise ProtocolError("it does not say how many clients trained each hypothesis", code="protocol.counts")
    return arrays, counts, flags


def _checked(asked: Asked, node: int, reply: Message) -> tuple[Vectors, NDArray[np.float64], NDArray[np.int64]] | None:
    """Check a reply, and return a site's sums (k, n), its counts, and its clients' positions in the sample."""
    if not answers_training(reply.content):
        return None
    arrays, count, part = sums_in(reply.content, len(asked.positions[node]))
    matrix = checked_rows(arrays, asked.hypotheses.k, asked.hypotheses)
    if not part.any():
        raise ProtocolError("it says that no client took part", code="protocol.no-releases")
    return matrix, count, asked.positions[node][part]


def furthest_sum(task: TrainingSpec, k: int, n: int, clients: int, most: float = 0.0) -> float:
    """Return the maximum norm of the summed updates of a site's clients, of n parameters, for each of k hypotheses.

    This is one clip norm for each client plus the norm that the noise exceeds only once in 10^12 releases.

    Parameters
    ----------
    task : TrainingSpec
        Its clip norm is public.
    most : float
        Maximum norm of an update; 0 for the clip norm.
    """
    mechanism = mechanism_of(task)
    clip_norm = max(task.clip_norm, LEAST_CLIP_NORM, most)
    reach = clients * clip_norm
    step = spacing(reach)
    if mechanism is not None:
        reach += clip_norm * mechanism.longest(n, RARE + math.log(k))
    return reach + rounding(mechanism, n, clip_norm, step, reach)


# --- the channel


class SiteSums(channels.Channel):
    """Sums over a site's clients, with noise once."""

    sanitiser = SiteSanitiser

    @staticmethod
    def price(release: Release) -> Release:
        """Return the release with which each client in the sums is charged."""
        return site_release(release)

    @staticmethod
    def rows(k: int, clients: int) -> int:
        """Return the number of sums, one for each hypothesis."""
        return k

    @staticmethod
    def count_deviation(task: TrainingSpec) -> float:
        """Return the standard deviation of the noise on each count."""
        mechanism = mechanism_of(task)
        return 0.0 if mechanism is None else mechanism.deviation(1) * mechanism.count_radius(task.choice_epsilon)

    def read(self, asked: Asked, replies: Iterable[Message]) -> Sums:
        """Return the sums in nodes' replies, in the order of sites' first clients, except those that are too long."""
        found = read_replies(asked, replies, partial(_checked, asked))
        k, n = asked.hypotheses.matrix.shape
        sums, counts, inside, outside = [], [], [], []
        for node in sorted(found, key=lambda node: int(asked.positions[node][0])):
            matrix, count, mine = found[node]
            longest = float(distances(matrix, np.zeros(n)).max())
            most = furthest_sum(asked.task, k, n, len(mine), self.nodes.run.per_node.update_norm)
            if not longest <= most:
                text = (
                    "left out the sums of %s: one has norm %.3g, above the %.3g that %d clients can have; if its "
                    "floor of clipping explains such long sums, raise the update-norm of per-node"
                )
                log(WARNING, text, asked.names[node], longest, most, len(mine))
                outside.append(mine)
                continue
            sums.append(matrix)
            counts.append(np.clip(count, 0, len(mine)))
            inside.append(mine)
        taken, left = asked.clients[np.sort(concatenated(inside))], asked.clients[concatenated(outside)]
        matrices, numbers = np.reshape(sums, (len(sums), k, n)), np.reshape(counts, (len(counts), k))
        return Sums(matrices, numbers, taken, len(asked.clients), len(asked.positions) - len(found), left)
