"""Recommendation by factors: the items' vectors are learnt together, and each user's vector stays on its device.

`Factors` is the model of *PAC identifiability in federated personalization* (Sec. 3): a user likes item i if
u . v_i > 0. For recommendations use `BiasedFactors`: its items and users also have biases, and a prior.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from umbel.data import Dataset
from umbel.models.hooks import Rows
from umbel.models.losses import SLOPES

INITIAL_SCALE = 0.1
"""Standard deviation of the components of fresh item vectors."""

VECTOR_DECAY, BIAS_DECAY = 5.0, 1.0
"""Precisions of the Gaussian priors of biased factors: of vectors and of biases, for items and users alike."""

SHRINKAGE = 5.0
"""Number of pseudo-labels at the average rate for each item and each user when `baselines` computes their biases."""

# A newcomer fits its vector to the items by gradient descent. Factors without a prior get a small decay for each row:
# without it, the vector of a client whose items can be separated would grow without limit.
_NEWCOMER_STEPS = 200
_NEWCOMER_DECAY = 1e-3


class Factors(nn.Module):
    """Scores u . v_i of I items, with vectors of length d (the PAC paper's k).

    Items step by the sum of their samples' gradients and the user's vector by the mean (PAC paper, Eqs. 1 and 2), since
    an item occurs at most once in a minibatch.
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
        """Return an initial vector of a user, from N(0, I/d)."""
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
        """Return the vectors (clients, d) that fit newcomers' rows best, for fixed items.

        For the arguments see `umbel.models.hooks.Hooks`; `loss` is a key of `umbel.models.losses.SLOPES`. A client
        without rows gets the vector 0.
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
        """Return the coefficients of a user's parameters for each item (I, d), and the rest of the score (I,)."""
        return items, np.zeros(len(items))

    @staticmethod
    def _newcomer_decay(size: int, count: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the decay (clients, size) that belongs to the mean loss over `count` rows (clients, 1)."""
        return np.full((len(count), size), _NEWCOMER_DECAY)

    @staticmethod
    def baselines(known: Rows, support: Rows, query: Rows, metric: str) -> dict[str, NDArray[np.float64]]:
        """Return `rules`, which know only the share of right signs."""
        return rules(known, support, query) if metric == "accuracy" else {}

    def misfit(self, dataset: Dataset) -> str:
        """Return why the model does not take the data, which must be items' numbers and labels of -1 and 1; else
        empty."""
        items = len(self.items)
        features, targets = np.asarray(dataset.features), np.asarray(dataset.targets)
        if features.shape[1:] != (1,) or targets.ndim != 1:
            return "needs rows with one feature, an item's number, and one label"
        if not np.isin(targets, (-1, 1)).all():
            return "needs labels of -1 and 1"
        if dataset.manifest.feature_scale != 1:
            return "needs unscaled item numbers: set feature_scale = 1"
        numbers = features[:, 0]
        if not ((numbers == np.floor(numbers)) & (numbers >= 0) & (numbers < items)).all():
            return f"knows only the items 0 to {items - 1}"
        owner = np.repeat(np.arange(len(dataset.offsets) - 1), np.diff(dataset.offsets))
        if len(np.unique(owner * items + numbers.astype(np.int64))) < len(numbers):
            return "takes each item at most once from a client"
        return ""


class BiasedFactors(Factors):
    """Scores u . v_i + b_i + c: biases of items, which are shared, and of users, which are not.

    Matrix factorisation with biases (Koren, Bell and Volinsky, 2009) for labels, at the maximum of the posterior:
    vectors and biases have Gaussian priors of mean 0 and precisions `VECTOR_DECAY` and `BIAS_DECAY`. So an item or a
    user with few labels stays near the average. A user starts at 0, as an average one. All steps follow the gradient
    summed over a minibatch, users' steps too. ``items`` (I, d + 1) holds each item's vector and then its bias, ``user``
    (d + 1,) the user's.
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
        """Return an initial vector and bias of a user, all 0."""
        return {"user": np.zeros(len(self.user))}

    @staticmethod
    def _seen_by_users(items: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.concatenate([items[:, :-1], np.ones((len(items), 1))], axis=1), items[:, -1]

    @staticmethod
    def _newcomer_decay(size: int, count: NDArray[np.int64]) -> NDArray[np.float64]:
        return _precisions(size) / count


def _precisions(size: int) -> NDArray[np.float64]:
    """Return the precisions of the priors of a vector and a bias, `size` numbers in all."""
    return np.array([VECTOR_DECAY] * (size - 1) + [BIAS_DECAY])


def rules(known: Rows, support: Rows, query: Rows) -> dict[str, NDArray[np.float64]]:
    """Return for each client how often baselines that learn no vector are right; a recommender must beat them.

    For the arguments see `umbel.models.hooks.Hooks.baselines`. An item counts as liked where neither the client's rate
    nor the item's decides. ``item and user bias`` is the mean plus the shrunken deviations of item and user (Koren,
    2009, Eq. 1).
    """
    (items, liked, _), (seen, seen_liked, seen_owner), (scored, truth, owner) = map(_likes, (known, support, query))
    clients, number = len(query[2]), 1 + max((int(one.max(initial=0)) for one in (items, seen, scored)), default=0)
    mean = float(liked.mean())
    often = np.bincount(items, minlength=number)
    likes = np.bincount(items, weights=liked, minlength=number)
    item_rate = np.where(often > 0, likes / np.maximum(often, 1), mean)
    item_bias = (likes - mean * often) / (often + SHRINKAGE)

    def of_clients(values: NDArray[Any], owner: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.bincount(owner, weights=values, minlength=clients).astype(np.float64)

    labels = of_clients(np.ones(len(seen)), seen_owner)
    user_rate = np.where(labels > 0, of_clients(seen_liked, seen_owner) / np.maximum(labels, 1), mean)
    user_bias = of_clients(seen_liked - mean - item_bias[seen], seen_owner) / (labels + SHRINKAGE)
    guesses = {
        "all liked": np.full(len(scored), True),
        "user's majority": user_rate[owner] >= 0.5,
        "item's majority": item_rate[scored] >= 0.5,
        "item and user bias": mean + item_bias[scored] + user_bias[owner] >= 0.5,
    }
    return {name: of_clients(guess == truth, owner) / query[2] for name, guess in guesses.items()}


def _likes(rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Return item, whether it is liked, and client of each row."""
    features, targets, lengths = rows
    return features[:, 0].astype(np.int64), targets > 0, np.repeat(np.arange(len(lengths)), lengths)
