"""A round's results on the server, checked: releases, sites' sums, and the scores of validation clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.protocol.arrays import Vectors

SPREAD = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantiles that show how clients differ; each is a value that a client reported."""


@dataclass(frozen=True)
class Releases:
    """The releases of a round, in client order."""

    vectors: Vectors  # (m, n), as they travelled, read-only; sum them in 64 bits (`umbel.protocol.arrays.mean_of`)
    clients: NDArray[np.int64]  # (m,), those that released, counted over the dataset
    choices: NDArray[np.int64] | None  # (m,), if clients were asked for them
    asked: int  # clients
    lost_nodes: int  # without a reply, or with an invalid one
    outside: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Clients whose releases were left out because they lie too far from the hypotheses. They were charged as well."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics that clients sent along, aggregated; umbel's own clients send none."""


@dataclass(frozen=True)
class Sums:
    """The sums of a round, in the order of the sites' first clients; other fields are as in `Releases`."""

    sums: Vectors  # (s, k, n): updates of each site's clients by hypothesis, with noise, in 32 bits or in 64
    counts: NDArray[np.float64]  # (s, k): clients that trained each, as the site says: with noise, from 0 to all
    clients: NDArray[np.int64]
    asked: int
    lost_nodes: int
    outside: NDArray[np.int64]  # clients of sites whose sum is longer than valid updates allow
    moments: NDArray[np.float64] | None = None
    """The second moments of all clients' updates in a secure sum, (k, n, n); for many parameters squares, (k, n)."""


@dataclass(frozen=True)
class Scores:
    """Loss and metric, averaged over the validation clients that replied, with equal weights.

    Values far from all others are pulled in (`umbel.privacy.channels.reports.pulled_in`).
    """

    loss: float
    metric: float
    clients: int
    # Quantiles `SPREAD` over the clients that reported without noise; empty where there are none.
    loss_spread: list[float] = field(default_factory=list, compare=False)
    metric_spread: list[float] = field(default_factory=list, compare=False)
    exact: int = field(default=0, compare=False)  # clients that reported without noise: no guarantee covers these
    noise: float = field(default=0.0, compare=False)  # standard deviation of the noise in loss and metric
    bound: float = field(default=0.0, compare=False)  # smallest to which reports with noise were clipped; 0 for none
