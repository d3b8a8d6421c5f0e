"""Recommendation by factors: the items' vectors are learnt together, each user's stays on its device.

A user likes item i if u . v_i > 0 (PAC identifiability in federated personalization, Sec. 3).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

INITIAL_SCALE = 0.1
"""Standard deviation of the components of fresh item vectors."""

Array = NDArray[np.floating]


class Factors(nn.Module):
    """The part of the model that all clients share: a vector for each item.

    Parameters
    ----------
    items : int
        I, the number of items.
    factors : int
        k, the length of the vectors.
    """

    def __init__(self, items: int, factors: int) -> None:
        super().__init__()
        self.items = nn.Parameter(nn.init.normal_(Tensor(items, factors), std=INITIAL_SCALE))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the vectors (rows, k) of the items (rows, 1)."""
        return self.items[rows[:, 0].long()]


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return ``y z``, the margin of scores (batch, 1) for labels -1 and 1."""
    return outputs.squeeze(-1) * targets


def _log_slope(margins: Array) -> Array:
    return -0.5 * (1 - np.tanh(margins / 2))


def _hinge_slope(margins: Array) -> Array:
    return -(margins < 1).astype(margins.dtype)


def _margin_slope(margins: Array) -> Array:
    return -np.ones_like(margins)


SLOPES: dict[str, Callable[[Array], Array]] = {"log": _log_slope, "hinge": _hinge_slope, "margin": _margin_slope}
"""Derivative of each loss of the margin (Assumption 2); at 0 it is not 0."""
