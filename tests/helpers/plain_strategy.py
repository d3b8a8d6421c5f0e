"""A third party's strategy for umbel's Mods: Flower's FedAvg, but for k models and k-means between their updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg


class PlainGroupPrivacy(FedAvg):
    """Send k models in one record, each array as (k, *shape), and average the replies cluster by cluster."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Tell the clients how many models there are."""
        self.sent = arrays
        k = len(next(iter(arrays.values())).numpy())
        return super().configure_train(server_round, arrays, ConfigRecord({**config, "k": k}), grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next models: the means of the clusters that k-means finds from this round's models on."""
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        if not valid:
            return None, None
        hypotheses = flat(self.sent)
        releases = np.concatenate([flat(reply.content.array_records["arrays"], rows=1) for reply in valid])
        labels: Any = None
        while True:
            nearest = np.square(releases[:, None] - hypotheses).sum(2).argmin(1)
            if np.array_equal(nearest, labels):
                break
            labels = nearest
            clusters = [releases[labels == j] for j in range(len(hypotheses))]
            hypotheses = np.stack([c.mean(0) if len(c) else h for c, h in zip(clusters, hypotheses, strict=True)])
        shapes = [array.numpy().shape for array in self.sent.values()]
        stops = np.cumsum([np.prod(shape[1:], dtype=int) for shape in shapes])[:-1]
        parts = np.split(hypotheses.astype(np.float32), stops, axis=1)
        arrays = {name: Array(p.reshape(s)) for name, p, s in zip(self.sent, parts, shapes, strict=True)}
        return ArrayRecord(arrays), MetricRecord({"groups": np.bincount(labels, minlength=len(hypotheses)).tolist()})


def flat(arrays: ArrayRecord, rows: int | None = None) -> Any:
    """Return a record of models as one matrix, a model in each row."""
    values = [array.numpy() for array in arrays.values()]
    return np.concatenate([value.reshape(rows or len(value), -1) for value in values], axis=1, dtype=float)
