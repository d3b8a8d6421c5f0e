"""Small networks, and modules written next to a user's own code."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from umbel.models import LOSSES, METRICS, Model
from umbel.protocol.arrays import Arrays

_numbers = itertools.count()


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    """Write a module where it can be imported and return its name, a new one each time: Python remembers modules."""
    name = f"garden_{next(_numbers)}"
    (folder / f"{name}.py").write_text(f"import torch\nfrom torch import nn\nfrom umbel import models\n{source}\n")
    monkeypatch.syspath_prepend(folder)
    return name


def own(network: Callable[[], nn.Module], loss: str = "cross-entropy", **kinds: Any) -> Model:
    """Return the model of a network of one's own, not yet built."""
    return Model("own", network, LOSSES[loss], METRICS["accuracy" if loss == "cross-entropy" else "rmse"], **kinds)


def tiny_cnn() -> nn.Module:
    """Return a convolution and a classifier for images of 6 x 6 and 3 classes."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))


TINY_CNN = own(tiny_cnn)


def draw_hypotheses(model: Model, k: int, seed: int = 0) -> Arrays:
    """Draw k hypotheses of a model."""
    drawn = [model.initial(seed + j) for j in range(k)]
    return {name: np.stack([one[name] for one in drawn]) for name in drawn[0]}


class Headed(nn.Module):
    """A body and a head, for rows of two numbers and one target: a head of one's own is ``local="head.*"``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(rows).tanh())
        return outputs


class Turned(nn.Module):
    """A last layer that takes rows along the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.head(rows.expand(3, *rows.shape)).mean(0)
        return outputs


def _with_frozen_bias(value: float) -> nn.Module:
    network = Headed()
    nn.init.constant_(network.body.bias, value)
    network.body.bias.requires_grad_(False)
    return network


headed_one, headed_other = partial(_with_frozen_bias, 1.0), partial(_with_frozen_bias, 2.0)


def headed(frozen: str = "", local: str = "head.*", loss: str = "mse") -> Model:
    """Return the model of a body and a head, of which the head stays with each client."""
    return Model("headed", Headed, LOSSES[loss], METRICS["rmse"], tuple(frozen.split()), tuple(local.split()))


class Adapted(nn.Module):
    """A backbone that is frozen, with a low-rank adapter (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(8, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.backbone(rows) + self.up(self.down(rows))
        return outputs


class Convolving(nn.Sequential):
    """Convolutions and a head for images of 8 x 8 and 2 classes, with an activation in place."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(4, 2, (3, 2), dilation=(1, 2)), nn.Flatten(), nn.Linear(8, 2),
        )  # fmt: skip
