"""What the tests of attacks share: networks small enough to check by hand, and true gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.base import LOSSES, METRICS, Model, Parameters

SHAPE = (4, 4)


def chain(*layers: nn.Module) -> Model:
    """A network of layers on images, for classes."""
    return Model("chain", lambda: nn.Sequential(*layers), LOSSES["cross-entropy"], METRICS["accuracy"])


def drawn(model: Model, seed: int = 0, scale: float = 1.0) -> Parameters:
    """Parameters from N(0, scale^2), in float64."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in model.shapes.items()
    }


def gradient_of(model: Model, parameters: Parameters, image: Tensor, label: int) -> Parameters:
    """The gradient of the cross entropy of one image."""
    own = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    loss = nn.functional.cross_entropy(
        model.apply(own, image[None].to(next(iter(own.values())))), torch.tensor([label])
    )
    return dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))


def noisy(gradient: Parameters, share: float, seed: int = 0) -> Parameters:
    """The gradient with Gaussian noise of `share` times each array's own norm."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value
        + share * value.norm() / value.numel() ** 0.5 * torch.randn(value.shape, generator=generator).to(value)
        for name, value in gradient.items()
    }


@pytest.fixture
def image() -> Tensor:
    """A bright cross on black, shape (4, 4)."""
    cross = torch.zeros(SHAPE, dtype=torch.float64)
    cross[1], cross[:, 2] = 0.75, 1.0
    return cross
