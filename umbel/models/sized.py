"""Networks whose name says their size, for tables: ``linear-5x1``, and ``mlp-5x16x1`` with a hidden layer of 16."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise

from torch import nn

from umbel.models.losses import LOSSES, METRICS, SLOPES, Loss
from umbel.models.model import Model

_NAME = re.compile(r"(?:linear-(\d+x\d+)|mlp-(\d+(?:x\d+){2,}))")
_LARGEST = 1_000_000


def network(sizes: tuple[int, ...]) -> nn.Module:
    """Return layers of these widths with ReLU between them; what a row holds is laid out flat."""
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def sized(name: str, loss: Loss | None = None) -> Model | None:
    """Return the model of a name as ``linear-IxO`` or ``mlp-IxHxO``; None if it is another name.

    Its loss is ``mse`` for one output and ``cross-entropy`` for more, unless one is given.
    """
    match = _NAME.fullmatch(name)
    sizes = tuple(map(int, (match[1] or match[2]).split("x"))) if match else ()
    if not sizes or not all(1 <= size <= _LARGEST for size in sizes):
        return None
    loss = loss or LOSSES["mse" if sizes[-1] == 1 else "cross-entropy"]
    metric = "accuracy" if loss.name == "cross-entropy" else "right-sign" if loss.name in SLOPES else "rmse"
    return Model(name, partial(network, sizes), loss, loss if loss.by_row else METRICS[metric])
