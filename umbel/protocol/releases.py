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
    """The releases of a round, in client order.

    Attributes
    ----------
    vectors : ndarray of float32, shape (m, n)
        Sanitised parameter vectors as they travelled; read-only. Sum over clients in 64 bits
        (`umbel.protocol.arrays.mean_of`).
    clients : ndarray of int, shape (m,)
        The clients that released, counted over the dataset.
    choices : ndarray of int, shape (m,), or None
        Their choices, if clients were asked for them.
    asked : int
        Number of clients asked.
    lost_nodes : int
        Nodes without a reply, or with an invalid one.
    outside : ndarray of int
        Clients whose releases were left out because they lie too far from the hypotheses. They were charged as well.
    metrics : mapping
        Metrics that clients sent along, aggregated; umbel's own clients send none.
    """

    vectors: Vectors
    clients: NDArray[np.int64]
    choices: NDArray[np.int64] | None
    asked: int
    lost_nodes: int
    outside: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sums:
    """The sums of a round, in the order of the sites' first clients.

    Attributes
    ----------
    sums : ndarray, shape (s, k, n)
        The updates of each site's clients, summed by hypothesis, with noise; in 32 bits as they travelled, or in 64.
    counts : ndarray, shape (s, k)
        How many of its clients trained each hypothesis, according to the site: with noise, and between 0 and all.
    clients, asked, lost_nodes, outside
        As in `Releases`; outside are clients of sites whose sum is longer than valid updates allow.
    moments : ndarray, shape (k, n, n) or (k, n), or None
        The second moments of all clients' updates in a secure sum, if asked for: for many parameters squares alone.
    """

    sums: Vectors
    counts: NDArray[np.float64]
    clients: NDArray[np.int64]
    asked: int
    lost_nodes: int
    outside: NDArray[np.int64]
    moments: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Scores:
    """Loss and metric, averaged over the validation clients that replied, with equal weights.

    Values far from all others are pulled in (`umbel.privacy.channels.reports.pulled_in`).

    Attributes
    ----------
    loss_spread, metric_spread : list of float
        The quantiles `SPREAD` over the clients that reported without noise; empty where there are none.
    exact : int
        Number of clients that reported without noise. No guarantee covers these.
    noise : float
        Standard deviation of the noise in loss and metric; 0 without.
    bound : float
        The smallest bound to which reports with noise were clipped; 0 where none was.
    """

    loss: float
    metric: float
    clients: int
    loss_spread: list[float] = field(default_factory=list, compare=False)
    metric_spread: list[float] = field(default_factory=list, compare=False)
    exact: int = field(default=0, compare=False)
    noise: float = field(default=0.0, compare=False)
    bound: float = field(default=0.0, compare=False)
