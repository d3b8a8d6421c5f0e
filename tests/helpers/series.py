"""Metrics as their values by labels."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from umbel.protocol.metrics import Labels


def values_of(metrics: Iterable[Metric]) -> dict[str, dict[Labels, float]]:
    """Return the values of each metric by its labels' values, in the labels' order."""
    return {
        one.name + "_total" * (one.type == "counter"): {
            tuple(sample.labels.values()): sample.value for sample in one.samples
        }
        for one in metrics
    }
