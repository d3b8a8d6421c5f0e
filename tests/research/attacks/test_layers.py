"""Fully connected layers are found by running the network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from umbel.models.losses import LOSSES, METRICS
from umbel.models.model import Model
from umbel.protocol.errors import NotApplicableError
from umbel.research.attacks.layers import dense_layers, inputs_of_layers, parameter

from .conftest import SHAPE, chain, drawn


class Backwards(nn.Module):
    """Runs its layers in another order than it names them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.first = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(images.flatten(1)))
        return logits


def test_layers_come_in_the_order_in_which_they_run() -> None:
    model = Model("backwards", Backwards, LOSSES["cross-entropy"], METRICS["accuracy"])
    assert dense_layers(model, drawn(model), SHAPE) == ["first", "last"]


def test_what_goes_into_a_layer_is_seen_and_no_hook_stays(image: Tensor) -> None:
    model = chain(nn.Flatten(), nn.Linear(16, 3))
    with inputs_of_layers(model) as seen:
        model.apply(drawn(model), image[None])
        assert torch.equal(seen["1"], image.reshape(1, 16))
    assert not any(layer._forward_pre_hooks for layer in model.module.modules())


def test_a_network_that_is_one_layer_has_no_prefix() -> None:
    model = Model("one", lambda: nn.Linear(4, 3), LOSSES["cross-entropy"], METRICS["accuracy"])
    assert dense_layers(model, drawn(model), (4,)) == [""]
    assert parameter("", "weight") == "weight"
    assert parameter("fc", "bias") == "fc.bias"


def test_a_network_without_a_fully_connected_layer_is_named() -> None:
    model = chain(nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 3, 4), nn.Flatten())
    with pytest.raises(NotApplicableError, match=r"model 'chain' has no fully connected layer \(torch.nn.Linear\)"):
        dense_layers(model, drawn(model), SHAPE)


def test_a_layer_that_sees_every_row_of_an_image_has_no_gradient_of_rank_one() -> None:
    model = chain(nn.Linear(4, 2), nn.Flatten())
    with pytest.raises(NotApplicableError, match="layer '0' of model 'chain' sees 4 vectors an image"):
        dense_layers(model, drawn(model), SHAPE)
