"""Gradient matching finds the image on a smooth network, and ends whatever it is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from umbel.models.model import Model
from umbel_lab.attacks.dlg import deep_leakage
from umbel_lab.attacks.quality import psnr

from .conftest import SHAPE, chain, drawn, gradient_of, noisy

pytestmark = pytest.mark.rest


@pytest.fixture
def smooth() -> Model:
    return chain(nn.Flatten(), nn.Linear(16, 12), nn.Sigmoid(), nn.Linear(12, 3))


def start_of(model: Model) -> dict[str, Tensor]:
    return drawn(model, scale=0.5)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_gradient_of_unknown_length_is_matched_by_its_direction(smooth: Model, image: Tensor) -> None:
    """As of an update that was clipped: the squared distance finds nothing, the cosine does."""
    start = start_of(smooth)
    clipped = {name: 0.01 * value for name, value in gradient_of(smooth, start, image, 1).items()}
    once, twice = (deep_leakage(smooth, start, clipped, SHAPE, generator(), starts, 150) for starts in (1, 2))
    assert once.distance > 1e-3 > 1e-5 > twice.distance
    assert psnr(twice.image.numpy(), image.numpy()) > 30 > psnr(once.image.numpy(), image.numpy())
    assert int(twice.label.argmax()) == 1


def test_the_same_starts_give_the_same_image_and_any_gradient_some(smooth: Model, image: Tensor) -> None:
    start = start_of(smooth)
    gradient = noisy(gradient_of(smooth, start, image, 1), share=0.5)
    first, again = (deep_leakage(smooth, start, gradient, SHAPE, generator(), iterations=20) for _ in range(2))
    assert torch.equal(first.image, again.image)
    assert first.distance == again.distance
    for value in (0.0, 1e30):
        impossible = {name: torch.full_like(array, value) for name, array in start.items()}
        match = deep_leakage(smooth, start, impossible, SHAPE, generator(), iterations=20)
        assert match.image.shape == SHAPE
        assert torch.isfinite(match.image).all()
