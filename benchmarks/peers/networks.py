"""The tasks' networks and losses in PyTorch, for the peers that use it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.peers.brief import TINY, Brief


class CNN(nn.Module):
    """umbel's ``cnn``, for images (batch, 28, 28)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        hidden = nn.functional.max_pool2d(self.conv2(self.conv1(images[:, None]).relu()), 2).relu()
        logits: Tensor = self.fc2(self.fc1(hidden.flatten(1)).relu())
        return logits


def network(brief: Brief, j: int = 0) -> nn.Module:
    """Return the task's network with its initial parameters."""
    module: nn.Module
    if brief.settings.network == "mlp":
        module = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    else:
        module = CNN(brief.hypotheses["fc2.bias"].shape[1])
    module.load_state_dict({name: torch.from_numpy(value) for name, value in brief.initial(j).items()})
    return module


def loss_of(brief: Brief) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the task's loss, of outputs and targets of a minibatch."""
    return rmse if brief.settings.network == "mlp" else nn.functional.cross_entropy


def rmse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the root mean square error."""
    return ((outputs.squeeze(-1) - targets).square().mean() + TINY).sqrt()
