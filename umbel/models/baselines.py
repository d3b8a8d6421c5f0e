"""What anybody can guess of preferences without learning a vector: the least that a recommender must beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from umbel.data import Dataset, held_out

SHRINKAGE = 5.0
"""Labels at the average rate that are added to each item and each user when their biases are computed."""


def baselines(dataset: Dataset) -> dict[str, float]:
    """Return how often each rule is right on the rows that newcomers are scored on.

    These are the rows of validation clients on which `Learner.score_newcomers` scores a model. A rule
    knows the labels of all training clients and, of each validation client, those that it fits its own vector to.
    What a client's rate or an item's cannot decide is taken to be liked.

    Parameters
    ----------
    dataset : Dataset
        Of preferences: an item's number, and a label of -1 or 1, a row.

    Returns
    -------
    dict from str to float
        Means over validation clients, each counting once: ``all liked``, ``user's majority``, ``item's
        majority``, and ``item and user bias``, the mean and what item and user stray from it, each shrunk
        (Koren, 2009, Eq. 1).
    """
    manifest, offsets = dataset.manifest, dataset.offsets
    items = np.asarray(dataset.features)[:, 0].astype(np.int64)
    liked = np.asarray(dataset.targets) > 0
    border = int(offsets[manifest.train])
    number = int(items.max()) + 1
    mean = float(liked[:border].mean())
    often = np.bincount(items[:border], minlength=number)
    likes = np.bincount(items[:border], weights=liked[:border], minlength=number)
    item_rate = np.where(often > 0, likes / np.maximum(often, 1), mean)
    item_bias = (likes - mean * often) / (often + SHRINKAGE)

    items, liked, lengths = items[border:], liked[border:], np.diff(offsets[manifest.train :])
    scored = held_out(lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)

    def of_users(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of values (rows,) over the rows that each user learns from."""
        return np.bincount(owner[~scored], weights=values[~scored], minlength=len(lengths)).astype(np.float64)

    known = of_users(np.ones(len(owner)))
    user_rate = np.where(known > 0, of_users(liked.astype(float)) / np.maximum(known, 1), mean)
    user_bias = of_users(liked - mean - item_bias[items]) / (known + SHRINKAGE)
    guesses = {
        "all liked": np.full(len(liked), True),
        "user's majority": user_rate[owner] >= 0.5,
        "item's majority": item_rate[items] >= 0.5,
        "item and user bias": mean + item_bias[items] + user_bias[owner] >= 0.5,
    }
    each = np.bincount(owner[scored], minlength=len(lengths))
    return {
        name: float(np.mean(np.bincount(owner[scored], weights=(guess == liked)[scored]) / each))
        for name, guess in guesses.items()
    }
