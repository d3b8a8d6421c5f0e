"""Recommendation by factors: the items' vectors are learnt together, each user's stays on its device.

A user likes item i if u . v_i > 0 (PAC identifiability in federated personalization, Sec. 3).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from federation import Federation
from models.losses import SLOPES

INITIAL_SCALE = 0.1
"""Standard deviation of the components of fresh item vectors."""

# How a newcomer fits its vector to the items: plain descent, and a little decay, without which the
# vector of a client whose items can be told apart would have no end to go to.
_NEWCOMER_STEPS = 200
_DECAY = 1e-3


class Factors(nn.Module):
    """Scores u . v_i.

    Items move by the sum of their samples' gradients and the user's vector by the mean (PAC paper,
    Eqs. 1 and 2), since in a minibatch an item occurs once at most.

    Parameters
    ----------
    items : int
        I, the number of items.
    factors : int
        d, the length of the vectors (the PAC paper's k).
    """

    local_parameters = ("user",)
    summed_parameters = ("items",)

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

    @staticmethod
    def fit_local(
        shared: dict[str, NDArray[Any]],
        features: NDArray[Any],
        targets: NDArray[Any],
        lengths: NDArray[np.int64],
        loss: str,
    ) -> dict[str, NDArray[np.float32]]:
        """Return the vectors (clients, d) that suit newcomers' rows best, items being as they are.

        Parameters
        ----------
        shared : dict of ndarray
            One hypothesis: ``items`` (I, d).
        features : ndarray, shape (rows, 1)
            Items' numbers, the rows of a client together.
        targets : ndarray, shape (rows,)
            Labels of -1 and 1.
        lengths : ndarray of int, shape (clients,)
            Number of rows of each client; 0 leaves its vector at 0.
        loss : str
            A key of `models.losses.SLOPES`.
        """
        items, slope = shared["items"], SLOPES[loss]
        position = np.arange(max(1, int(lengths.max(initial=0))))[None, :]
        real = position < lengths[:, None]
        starts = np.cumsum(lengths) - lengths
        rows = np.where(real, starts[:, None] + position, 0)
        users = np.zeros((len(lengths), items.shape[1]))
        if len(features):
            vectors, y = items[features[:, 0].astype(np.int64)[rows]].astype(np.float64), targets[rows]
            count = np.maximum(lengths, 1)[:, None]
            size = np.square(vectors).sum(axis=2)
            step = 1 / (np.where(real, size, 0).sum(axis=1, keepdims=True) / count / 4 + _DECAY)
            for _ in range(_NEWCOMER_STEPS):
                slopes = np.where(real, slope(y * np.einsum("mbd,md->mb", vectors, users)) * y, 0)
                users -= step * (np.einsum("mb,mbd->md", slopes, vectors) / count + _DECAY * users)
        return {"user": users.astype(np.float32)}

    def misfit(self, federation: Federation) -> str:
        """Return what keeps the model from the data: items' numbers, and labels of -1 and 1; empty if nothing does."""
        items = len(self.items)
        features, targets = np.asarray(federation.features), np.asarray(federation.targets)
        if features.shape[1:] != (1,) or targets.ndim != 1:
            return "needs rows of one feature, an item's number, and one label"
        if not np.isin(targets, (-1, 1)).all():
            return "needs labels of -1 and 1"
        if federation.manifest.feature_scale != 1:
            return "needs items' numbers as they are, and feature_scale = 1"
        numbers = features[:, 0]
        if not ((numbers == np.floor(numbers)) & (numbers >= 0) & (numbers < items)).all():
            return f"knows the items 0 to {items - 1} alone"
        owner = np.repeat(np.arange(len(federation.offsets) - 1), np.diff(federation.offsets))
        if len(np.unique(owner * items + numbers.astype(np.int64))) < len(numbers):
            return "takes an item once at most from each client"
        return ""
