"""A linear layer on fixed features: ``umbel.models.softmax:softmax20x10`` for 20 features and 10 classes.

The price n/nu of a guarantee grows with the number n of parameters. Where features are public, this
layer is all that is trained, and n is no more than features times classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn


class Softmax(nn.Module):
    """Logits ``W x`` without intercept, W drawn from N(0, .01²).

    From nearly 0 the first step on all rows is nearly that of least squares, which for white features
    is its solution. Exactly 0 would make all hypotheses the same.

    Parameters
    ----------
    features, classes : int
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes, bias=False)
        nn.init.normal_(self.linear.weight, std=0.01)

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits (batch, classes) of rows (batch, features)."""
        logits: Tensor = self.linear(rows)
        return logits


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """Return the factory of a size, so that a name in the run config can say it."""
    if size := re.fullmatch(r"softmax([1-9]\d{0,4})x([1-9]\d{0,3})", name):
        return partial(Softmax, *map(int, size.groups()))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
