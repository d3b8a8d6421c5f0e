"""The channel of reports: loss and metric of clients, with noise, or exactly where a site lets them leave so.

Training clients report separately. For others the site reports their mean, so that noise is drawn once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from umbel.privacy import channels
from umbel.privacy.accounting.guarantee import report_deviation
from umbel.privacy.channels import Flags, Ids, Outgoing, Place, Sanitiser
from umbel.privacy.mechanisms.base import Matrix
from umbel.privacy.mechanisms.laplace import Laplace
from umbel.privacy.mechanisms.randomness import noise_sources
from umbel.privacy.mechanisms.sanitise import LARGEST, check_noise, round_to_grid, sanitise
from umbel.protocol.arrays import Arrays, Labels
from umbel.protocol.asked import Asked, read_replies
from umbel.protocol.flower import filled
from umbel.protocol.records import record_in
from umbel.protocol.release import Clipping, Release, report_release
from umbel.protocol.releases import SPREAD, Scores
from umbel.protocol.tasks import EvaluationSpec

_SCORES, _NOISE, _BOUND = "scores", "noise-multiplier", "bound"
_FAR = 10.0  # times the spread of most losses
_SHARE = 0.2  # share of clients that may report arbitrary values

# --- at a site


@dataclass(frozen=True)
class Reported(Outgoing):
    """Loss and metric, with nu of their noise, and their bound before it."""

    noise_multiplier: float = 0.0
    bound: float = 0.0

    def records(self) -> Mapping[str, Any]:
        """Return loss and metric, and their noise if they have any."""
        loss, metric = np.asarray(self.scores, float).tolist()
        told = {_NOISE: self.noise_multiplier, _BOUND: self.bound} if self.noise_multiplier else {}
        return {_SCORES: filled(MetricRecord(), {"loss": loss, "metric": metric, **told})}


@dataclass(frozen=True)
class ReportSanitiser(Sanitiser):
    """A site's sanitisation of loss and metric, which lie in a square whose diagonal is the `radius`.

    The guarantee holds between any two reports of one client. Without a `mechanism` they leave exactly.
    """

    place: Place
    round: int
    mechanism: Laplace | None
    radius: float

    @classmethod
    def of(cls, place: Place, hypotheses: Arrays, task: EvaluationSpec) -> ReportSanitiser:
        """See `umbel.privacy.channels.Sanitiser.of`."""
        policy = place.site.policy
        if policy.reports_exactly and not policy.trainers_report:
            return cls(place, task.round, None, 0.0)
        mechanism, radius = Laplace(policy.report_noise), math.sqrt(2) * policy.reports.bound
        check_noise(mechanism, 2, radius)
        return cls(place, task.round, mechanism, radius)

    @property
    def release(self) -> Release | None:
        """The release with which each reporting client is charged."""
        if self.mechanism is None:
            return None
        return report_release(self.mechanism.noise_multiplier, self.place.site.policy.reports.bound)

    def leave(self, clients: Ids, results: Matrix, chosen: Labels, paid: Flags) -> Reported:
        """Return the loss and metric of charged clients, clipped and with noise."""
        policy, scores = self.place.site.policy, np.full((2, len(paid)), np.nan)
        if len(clients):
            scores[:, paid] = self._sanitised(clients, results).T
        return Reported(paid, {}, scores, policy.report_noise, policy.reports.bound)

    def _sanitised(self, clients: Ids, scores: Matrix) -> Matrix:
        """Return loss and metric (m, 2)."""
        if self.mechanism is None:
            return scores
        site, seed = self.place.site, self.place.seed
        bound, many = site.policy.reports.bound, 1
        clipped = np.clip(np.nan_to_num(scores, nan=bound), 0, bound)
        if site.policy.trainers_report:
            sources = noise_sources(seed, self.round, clients, "report")
            # Centred, because the mechanism clips to the radius around 0.
            noisy = sanitise(self.mechanism, clipped - bound / 2, self.radius, Clipping.PUBLIC, sources) + bound / 2
        else:
            sources, many = noise_sources(seed, self.round, [site.first], "mean report"), len(clipped)
            noisy = clipped.sum(axis=0) + self.mechanism.noise([2], np.array([[self.radius]]), sources)
        finest = float(np.spacing(np.float32(bound * many)))
        rounded = round_to_grid(noisy, self.mechanism.deviation(2) * self.radius, finest) / many
        return np.broadcast_to(rounded, clipped.shape)


# --- at the server


def scores_in(content: RecordDict, asked: int) -> NDArray[np.float64] | None:
    """Return loss and metric (2, asked) of the asked clients; None where a reply has none of that shape."""
    record = content.get(_SCORES)
    if not isinstance(record, MetricRecord):
        return None
    values = [np.asarray(record.get(name, ()), np.float64) for name in ("loss", "metric")]
    return np.stack(values) if all(value.shape == (asked,) for value in values) else None


def _scores_in(asked: Asked, node: int, reply: Message) -> tuple[NDArray[np.float64], bool, float, float] | None:
    """Return loss and metric (2, clients) in a reply, and according to it whether they have no noise, nu and bound."""
    if (values := scores_in(reply.content, len(asked.positions[node]))) is None:
        return None
    record = record_in(reply.content, _SCORES, MetricRecord)
    found = [record.get(name, 0.0) for name in (_NOISE, _BOUND)]
    nu, bound = (float(one) if isinstance(one, int | float) and 0 <= one <= LARGEST else 0.0 for one in found)
    return values, not record.get(_NOISE), nu, bound


def pulled_in(values: NDArray[np.float64], ordered: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return values (m,) of clients, with those far from all others pulled in.

    `ordered` has the same values sorted, if known. Values with the usual spread of losses stay unchanged, so that their
    mean is the plain one. A value is far at ten times the distance within which four in five clients lie from the
    median, or at ten times the distance of the median from 0. If at most one in five values is negative, the result has
    no negative value, as with losses.

    So if at most one in five clients reports an arbitrary value, each of them counts as at most ten times the honest
    scale: among twenty losses near .8 one moves the mean by at most .4, and not to 1e37.
    """
    if len(values) < 3:
        return values
    ordered = np.sort(values) if ordered is None else ordered
    middle = _middle(ordered)
    apart = np.sort(np.abs(ordered - middle))
    width = _FAR * max(float(apart[int((1 - _SHARE) * (len(values) - 1))]), abs(middle))
    if width == 0 and apart[-1] > 0:
        # If most are 0, as for a hinge loss that is met, the scale is that of the others.
        width = _FAR * _middle(apart[apart > 0])
    low, high = middle - width, middle + width
    if ordered[math.ceil(_SHARE * (len(values) - 1))] >= 0:
        low = max(low, 0.0)
    return values if low <= ordered[0] and ordered[-1] <= high else np.clip(values, low, high)


def _middle(ordered: NDArray[np.float64]) -> float:
    """Return the median of sorted values (m,)."""
    half = len(ordered) // 2
    return float(ordered[half]) if len(ordered) % 2 else float(ordered[half - 1] + ordered[half]) / 2


# --- the channel


class Reports(channels.Channel):
    """Loss and metric of each client, or a site's mean of them."""

    sanitiser = ReportSanitiser

    def read(self, asked: Asked, replies: Iterable[Message]) -> Scores | None:
        """Return the mean, or the median, of loss and metric in nodes' replies; None without valid replies.

        A metric that is a share, such as an accuracy, is clipped to 0 to 1.
        """
        scores, exact = np.full((2, len(asked.clients)), np.nan), np.zeros(len(asked.clients), bool)
        variance, bounds = 0.0, [0.0]
        found = read_replies(asked, replies, partial(_scores_in, asked))
        for node, (values, exactly, nu, bound) in found.items():
            positions = asked.positions[node]
            scores[:, positions], exact[positions] = values, exactly
            if nu and (there := values[:, ~np.isnan(values).any(axis=0)]).size:
                # A site's mean has noise once, and stands for each of its clients.
                separate = 1 if (there == there[:, :1]).all() else there.shape[1]
                variance += separate * (report_deviation(nu, bound) ** 2)
                bounds.append(bound)
        answered = ~np.isnan(scores).any(axis=0)
        # An infinite loss counts as the largest finite one: if it were left out, a model that diverged for most clients
        # would be the best for the rest. A loss that no model has would make the mean infinite.
        scores = np.clip(scores, -LARGEST, LARGEST)
        if self.nodes.metric_is_share:
            scores[1] = np.clip(scores[1], 0, 1)
        if not answered.any():
            return None
        # In client order, so that rounding does not depend on the nodes.
        there, told_exactly = scores[:, answered], exact[answered]
        ordered = np.sort(there)
        if self.nodes.run.validation.by == "median":
            loss, metric = np.median(there, axis=1)
        else:
            loss, metric = (pulled_in(*values).mean() for values in zip(there, ordered, strict=True))
        m, most = there.shape[1], int(told_exactly.sum())
        # Noise, or a mean over many clients, shows nothing about their differences.
        alone = ordered if most == m else np.sort(there[:, told_exactly])
        spread = alone[:, [round(q * (most - 1)) for q in SPREAD]].tolist() if most else [[], []]
        clipped = min(filter(None, bounds), default=0.0)
        return Scores(float(loss), float(metric), m, spread[0], spread[1], most, math.sqrt(variance) / m, clipped)

    @staticmethod
    def answered(task: EvaluationSpec, content: RecordDict) -> int:
        """Return the number of a task's clients if a reply has a place for each, otherwise 0."""
        return 0 if scores_in(content, len(task.clients)) is None else len(task.clients)
