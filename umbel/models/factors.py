"""Recommendation by factors: the items' vectors are learnt together, each user's stays on its device.

`Factors` is the model of *PAC identifiability in federated personalization* (Sec. 3): a user likes item i if
u . v_i > 0. Recommend with `BiasedFactors`: items and users also have biases, and a prior.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from umbel.data import Dataset, held_out
from umbel.models.losses import SLOPES

INITIAL_SCALE = 0.1
"""Standard deviation of the components of fresh item vectors."""

VECTOR_DECAY, BIAS_DECAY = 5.0, 1.0
"""Of biased factors: precisions of the Gaussian priors of vectors and of biases, of items and users alike."""

SHRINKAGE = 5.0
"""Labels at the average rate that are added to each item and each user when `baselines` computes their biases."""

# How a newcomer fits its vector to the items: plain descent, and for factors without a prior a little
# decay a row, without which the vector of a client whose items can be told apart would have no end to go to.
_NEWCOMER_STEPS = 200
_NEWCOMER_DECAY = 1e-3


class Factors(nn.Module):
    """Scores u . v_i of I items, with vectors of length d (the PAC paper's k).

    Items move by the sum of their samples' gradients and the user's vector by the mean (PAC paper,
    Eqs. 1 and 2), since in a minibatch an item occurs once at most.
    """

    local_parameters = ("user",)
    summed_parameters: tuple[str, ...] = ("items",)

    def __init__(self, items: int, factors: int) -> None:
        super().__init__()
        self.items = nn.Parameter(nn.init.normal_(Tensor(items, factors), std=INITIAL_SCALE))
        self.user = nn.Parameter(torch.zeros(factors))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the scores (rows, 1) of the items (rows, 1)."""
        scores: Tensor = self.items[rows[:, 0].long()] @ self.user
        return scores[:, None]

    def draw_local(self, generator: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Return a fresh user's vector, from N(0, I/d)."""
        size = len(self.user)
        return {"user": generator.standard_normal(size) / np.sqrt(size)}

    @classmethod
    def fit_local(
        cls,
        shared: dict[str, NDArray[Any]],
        features: NDArray[Any],
        targets: NDArray[Any],
        lengths: NDArray[np.int64],
        loss: str,
    ) -> dict[str, NDArray[np.float32]]:
        """Return the vectors (clients, d) that suit newcomers' rows best, items being as they are.

        For the arguments see `umbel.models.hooks.Hooks`; `loss` is a key of `umbel.models.losses.SLOPES`. A client
        without rows has a vector of 0.
        """
        vectors, offsets = cls._seen_by_users(shared["items"].astype(np.float64))
        slope = SLOPES[loss]
        position = np.arange(max(1, int(lengths.max(initial=0))))[None, :]
        real = position < lengths[:, None]
        rows = np.where(real, (np.cumsum(lengths) - lengths)[:, None] + position, 0)
        users = np.zeros((len(lengths), vectors.shape[1]))
        if len(features):
            numbers = features[:, 0].astype(np.int64)[rows]
            own, fixed, y = vectors[numbers], offsets[numbers], np.where(real, targets[rows], 0).astype(np.float64)
            count = np.maximum(lengths, 1)[:, None]
            decay = cls._newcomer_decay(users.shape[1], count)
            size = np.where(real, np.square(own).sum(axis=2), 0).sum(axis=1, keepdims=True) / count
            step = 1 / (size / 4 + np.max(decay, axis=1, keepdims=True))
            for _ in range(_NEWCOMER_STEPS):
                margins = y * (np.matmul(own, users[:, :, None])[:, :, 0] + fixed)
                slopes = (slope(margins) * y)[:, None, :]
                users -= step * (np.matmul(slopes, own)[:, 0] / count + decay * users)
        return {"user": users.astype(np.float32)}

    @staticmethod
    def _seen_by_users(items: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the factors of a user's parameters at each item (I, d), and the rest of the score (I,)."""
        return items, np.zeros(len(items))

    @staticmethod
    def _newcomer_decay(size: int, count: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the decay (clients, size) that goes with the mean loss over `count` rows (clients, 1)."""
        return np.full((len(count), size), _NEWCOMER_DECAY)

    @staticmethod
    def baselines(dataset: Dataset, metric: str) -> dict[str, float]:
        """Return `umbel.models.factors.baselines`, which say how often a sign is right."""
        return baselines(dataset) if metric == "right-sign" else {}

    def misfit(self, dataset: Dataset) -> str:
        """Return what keeps the model from the data: items' numbers, and labels of -1 and 1; empty if nothing does."""
        items = len(self.items)
        features, targets = np.asarray(dataset.features), np.asarray(dataset.targets)
        if features.shape[1:] != (1,) or targets.ndim != 1:
            return "needs rows of one feature, an item's number, and one label"
        if not np.isin(targets, (-1, 1)).all():
            return "needs labels of -1 and 1"
        if dataset.manifest.feature_scale != 1:
            return "needs items' numbers as they are, and feature_scale = 1"
        numbers = features[:, 0]
        if not ((numbers == np.floor(numbers)) & (numbers >= 0) & (numbers < items)).all():
            return f"knows the items 0 to {items - 1} alone"
        owner = np.repeat(np.arange(len(dataset.offsets) - 1), np.diff(dataset.offsets))
        if len(np.unique(owner * items + numbers.astype(np.int64))) < len(numbers):
            return "takes an item once at most from each client"
        return ""


class BiasedFactors(Factors):
    """Scores u . v_i + b_i + c: biases of items, which are shared, and of users, which are not.

    Matrix factorisation with biases (Koren, Bell and Volinsky, 2009) for labels, at the maximum of the posterior:
    vectors and biases have Gaussian priors of mean 0 and precisions `VECTOR_DECAY` and `BIAS_DECAY`. So an item
    or a user with few labels stays near the average. A user starts at 0, as an average one; all steps go
    down the sum over a minibatch, those of users too. ``items`` (I, d + 1) holds each item's vector and then its
    bias, ``user`` (d + 1,) the user's.
    """

    summed_parameters = ("items", "user")

    def __init__(self, items: int, factors: int) -> None:
        super().__init__(items, factors)
        self.items = nn.Parameter(torch.cat([self.items.detach(), torch.zeros(items, 1)], dim=1))
        self.user = nn.Parameter(torch.zeros(factors + 1))
        self.decays = {"items": _precisions(factors + 1), "user": _precisions(factors + 1)}

    def forward(self, rows: Tensor) -> Tensor:
        """Return the scores (rows, 1) of the items (rows, 1)."""
        items = self.items[rows[:, 0].long()]
        scores: Tensor = items[:, :-1] @ self.user[:-1] + items[:, -1] + self.user[-1]
        return scores[:, None]

    def draw_local(self, generator: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Return a fresh user's vector and bias, 0."""
        return {"user": np.zeros(len(self.user))}

    @staticmethod
    def _seen_by_users(items: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.concatenate([items[:, :-1], np.ones((len(items), 1))], axis=1), items[:, -1]

    @staticmethod
    def _newcomer_decay(size: int, count: NDArray[np.int64]) -> NDArray[np.float64]:
        return _precisions(size) / count


def _precisions(size: int) -> NDArray[np.float64]:
    """Return those of the priors of a vector and a bias, `size` numbers in all."""
    return np.array([VECTOR_DECAY] * (size - 1) + [BIAS_DECAY])


def baselines(dataset: Dataset) -> dict[str, float]:
    """Return how often rules that learn no vector are right: the least that a recommender must beat.

    They are scored on the rows of validation clients on which `Learner.score_newcomers` scores a model. A rule
    knows the labels of all training clients and, of each validation client, those that it fits its own vector to.
    What a client's rate or an item's cannot decide is taken to be liked. The results are means over validation clients,
    each counting once; ``item and user bias`` is the mean and what item and user stray from it, each shrunk (Koren,
    2009, Eq. 1).
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
