"""Inference from a release about its client: the likelihood of artificial clients, by the mechanism's law.

The density of vector Laplace noise at a distance d from its centre is proportional to r^-n exp(-n d / (nu r)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Matrix = NDArray[np.float64]
Chosen = NDArray[np.int64]


@dataclass(frozen=True)
class Law:
    """The distribution of a release.

    Updates are clipped to a public clip norm; otherwise it is the norm of the update, at least `clip_norm`. An open
    choice has a choice-epsilon of 0.
    """

    noise_multiplier: float
    clip_norm: float
    public: bool
    choice_epsilon: float

    def clipped(self, updates: Matrix) -> Matrix:
        """Return updates (..., n) as released, without noise."""
        if not self.public:
            return updates
        norms = np.linalg.norm(updates, axis=-1, keepdims=True)
        clipped: Matrix = updates * (self.clip_norm / np.maximum(norms, self.clip_norm))
        return clipped

    def clip_norms(self, updates: Matrix) -> Matrix:
        """Return the clip norm (...) of the noise on updates (..., n)."""
        if self.public:
            return np.full(updates.shape[:-1], self.clip_norm)
        clip_norms: Matrix = np.maximum(np.linalg.norm(updates, axis=-1), self.clip_norm)
        return clip_norms


def log_likelihood(law: Law, hypotheses: Matrix, releases: Matrix, updates: Matrix, best: Chosen) -> Matrix:
    """Return the log likelihood (m, c) of each candidate given each client's release, up to a constant for each client.

    Hypotheses are (k, n) and releases (m, n). The updates (c, k, n) of the candidates from each hypothesis are not
    clipped; `best` (c,) is the hypothesis that fits each best.
    """
    (k, n), nu = hypotheses.shape, law.noise_multiplier
    moved, clip_norms = law.clipped(updates), law.clip_norms(updates)
    logs = np.empty((k, len(releases), len(updates)))
    for j in range(k):
        apart = distances(releases - hypotheses[j], moved[:, j])
        logs[j] = -n * apart / (nu * clip_norms[:, j]) - n * np.log(clip_norms[:, j])
        # Randomised response: the best has e^eps times the probability of any other.
        if law.choice_epsilon:
            logs[j] += law.choice_epsilon * (best == j)
        elif k > 1:
            logs[j][:, best != j] = -np.inf
    total: Matrix = special.logsumexp(logs, axis=0)
    return total


def site_log_likelihood(
    law: Law, sums: Matrix, counts: Matrix, updates: Matrix, best: Chosen, others: Matrix, chosen: Matrix
) -> Matrix:
    """Return the log likelihood (c,) of each candidate as a client of a site, given its sums (k, n) and counts (k,).

    Updates and `best` are as for `log_likelihood`. `others` (draws, k, n) are sums of clipped updates of artificial
    other clients, of which `chosen` (draws, k) chose each hypothesis; the likelihood is their mean.
    """
    (k, n), moved = sums.shape, law.clipped(updates)
    rate = n / (law.noise_multiplier * law.clip_norm)
    logs = np.zeros((len(others), len(updates)))
    for j in range(k):
        rest, left = sums[j] - others[:, j], counts[j] - chosen[:, j]
        ours = best == j
        logs -= np.where(ours, rate * distances(rest, moved[:, j]), rate * np.linalg.norm(rest, axis=1)[:, None])
        if k > 1:
            # The noise on a count: two counts that move by one each cost choice-epsilon together.
            logs -= law.choice_epsilon / 2 * np.abs(left[:, None] - ours)
    total: Matrix = special.logsumexp(logs, axis=0)
    return total


def weights(logs: Matrix) -> Matrix:
    """Return the posterior (m, c) of equally likely candidates."""
    found: Matrix = special.softmax(logs, axis=-1)
    return found


def distances(one: Matrix, other: Matrix) -> Matrix:
    """Return the distances (a, b) between rows of (a, n) and of (b, n)."""
    square = np.square(one).sum(axis=1)[:, None] + np.square(other).sum(axis=1) - 2 * one @ other.T
    found: Matrix = np.sqrt(np.maximum(square, 0.0))
    return found
