"""Clients to try the theorems of the PAC paper on, and the attack on all of them at once.

A trial is a client with N labelled items of I, whose local parameters u and whose item vectors are drawn
from N(0, I), as in nobody's data: the theorems hold for any. All trials of a table train together, as the
clients of a cohort do, and the server's estimate is that of `umbel.research.attacks.pac_attack`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from umbel import models
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.engines import learner_for
from umbel.research.attacks.pac_attack import Estimate

ITEMS, FACTORS, LABELLED = 500, 8, 40
LOSS = "log"

# Draws for different purposes.
_CLIENTS, _BATCHES, NOISE = range(3)
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Trials:
    """Clients to attack.

    Attributes
    ----------
    items : ndarray, shape (I, d)
        The honest item vectors.
    local : ndarray, shape (trials, d)
        Their local parameters.
    cohort : Cohort
        Each client's N labelled items and labels, of which a share p is positive.
    """

    items: NDArray[np.float32]
    local: NDArray[np.float32]
    cohort: Cohort

    @classmethod
    def draw(cls, count: int, p: float, seed: int) -> Trials:
        """Draw clients, each of whom likes what a taste of its own likes, by the sign of a linear score."""
        rng = np.random.default_rng([seed, _CLIENTS])
        items = rng.standard_normal((ITEMS, FACTORS)).astype(np.float32)
        local = rng.standard_normal((count, FACTORS)).astype(np.float32)
        scores = rng.standard_normal((count, FACTORS)) @ items.T
        liked = round(p * LABELLED)
        labelled = np.empty((count, LABELLED), np.int64)
        for own, score in zip(labelled, scores, strict=True):
            own[:liked] = rng.choice(np.flatnonzero(score > 0), liked, replace=False)
            own[liked:] = rng.choice(np.flatnonzero(score < 0), LABELLED - liked, replace=False)
        labels = np.tile(np.where(np.arange(LABELLED) < liked, 1, -1), count)
        cohort = Cohort(
            torch.from_numpy(labelled.reshape(-1, 1).astype(np.float32)),
            torch.from_numpy(labels),
            np.full(count, LABELLED, np.int64),
        )
        return cls(items, local, cohort)

    def narrowed(self) -> Trials:
        """Return the same clients with their own items alone, numbered alike.

        Where zeros are sent, all other items come back as zeros.
        """
        numbers = torch.arange(LABELLED, dtype=torch.float32).repeat(len(self.local))[:, None]
        return Trials(self.items[:LABELLED], self.local, Cohort(numbers, self.cohort.targets, self.cohort.lengths))

    def errors(self, estimates: Sequence[Estimate], local: NDArray[np.float32]) -> Matrix:
        """Return for each client the share of items on which the server's estimate errs (Definition 1)."""
        wrong = np.sign(vectors(estimates) @ self.items.T) != np.sign(local @ self.items.T)
        return np.asarray(wrong.mean(axis=1), np.float64)


def vectors(estimates: Sequence[Estimate]) -> Matrix:
    """Return the server's estimate of each client's vector, (m, d)."""
    return np.stack([estimate.vector for estimate in estimates])


def interactions(
    clients: Trials, update: LocalUpdate, zero: bool, seed: int
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]]:
    """Yield without end the items that clients trained (m, I, d), those they were sent, and their vectors (m, d)."""
    learner = learner_for(models.load(f"factors items={len(clients.items)} size={FACTORS}", LOSS), "cpu")
    sent = np.zeros_like(clients.items) if zero else clients.items
    local, nobody = {"user": clients.local}, np.zeros(len(clients.local), np.int64)
    generators = [np.random.default_rng([seed, _BATCHES, c]) for c in range(len(nobody))]
    while True:
        trained, local = learner.train({"items": sent[None]}, nobody, clients.cohort, update, generators, local)
        yield trained["items"], sent, local["user"]


def attack(
    clients: Trials,
    update: LocalUpdate,
    zero: bool,
    seed: int,
    release: Callable[[NDArray[np.float32]], NDArray[Any]] | None = None,
) -> Iterator[tuple[int, list[Estimate], NDArray[np.float32]]]:
    """Attack all clients at once, without end.

    Parameters
    ----------
    clients : Trials
    update : LocalUpdate
        What a client does in an interaction.
    zero : bool
        Whether the server sends zeros, or else the honest items for the spectral attack.
    seed : int
    release : callable, optional
        Returns what clients release of their updates (m, I, d); by default these as they are.

    Yields
    ------
    t : int
        Number of the interaction, from 1 on.
    estimates : list of Estimate
        What the server knows of each client; the same list every time.
    local : ndarray, shape (m, d)
        Each client's own vector.
    """
    estimates = [Estimate(FACTORS, spectral=not zero) for _ in clients.local]
    for t, (trained, sent, local) in enumerate(interactions(clients, update, zero, seed), 1):
        updates = trained - sent
        for estimate, message in zip(estimates, release(updates) if release else updates, strict=True):
            estimate.add(message)
        yield t, estimates, local
