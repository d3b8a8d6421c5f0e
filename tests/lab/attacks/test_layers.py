"""The fully connected layers of a network, and the class that the last one shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.errors import raises
from umbel.models.losses import LOSSES, METRICS
from umbel.models.model import Model
from umbel.protocol.errors import NotApplicableError
from umbel_lab.attacks.rank_one import bias_label, dense_layers, inputs_of_layers, label_given_image, parameter

from .conftest import SHAPE, chain, drawn, gradient_of, noisy

pytestmark = pytest.mark.rest


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


@pytest.mark.parametrize(
    ("layers", "part"),
    [
        ((nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 3, 4), nn.Flatten()), "chain"),
        ((nn.Linear(4, 2), nn.Flatten()), "4 vec"),
    ],
    ids=["no dense layer", "one that sees every row of an image"],
)
def test_networks_without_a_gradient_of_rank_one_are_refused(layers: tuple[nn.Module, ...], part: str) -> None:
    model = chain(*layers)
    with raises(NotApplicableError, "attack.no-dense-layer", part):
        dense_layers(model, drawn(model), SHAPE)


def network(bias: bool = True) -> Model:
    return chain(nn.Flatten(), nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 10, bias=bias))


@pytest.mark.parametrize("label", range(10))
def test_without_noise_every_label_is_read(image: Tensor, label: int) -> None:
    model = network()
    start = drawn(model, scale=0.1)
    gradient = gradient_of(model, start, image, label)
    assert (gradient["3.bias"] < 0).tolist() == [j == label for j in range(10)]
    assert bias_label(model, start, gradient, SHAPE) == label
    assert label_given_image(model, start, gradient, image) == label


def test_without_a_bias_the_weights_tell(image: Tensor) -> None:
    model = network(bias=False)
    start = drawn(model, scale=0.1)
    gradient = gradient_of(model, start, image, 7)
    assert label_given_image(model, start, gradient, image) == 7
    with raises(NotApplicableError, "attack.no-bias", "chain"):
        bias_label(model, start, gradient, SHAPE)


def test_with_a_guess_at_the_image_the_whole_layer_tells_more_than_its_bias(image: Tensor) -> None:
    model = network()
    start = drawn(model, scale=0.1)
    gradient = gradient_of(model, start, image, 4)
    tries = [noisy(gradient, share=3.0, seed=seed) for seed in range(50)]
    by_bias = sum(bias_label(model, start, one, SHAPE) == 4 for one in tries)
    guess = 0.5 * image + 0.25
    by_layer = sum(label_given_image(model, start, one, guess) == 4 for one in tries)
    assert by_bias < 30
    assert by_layer > 45


def test_a_network_that_does_not_end_in_classes_is_refused() -> None:
    model = chain(nn.Flatten(), nn.Linear(16, 6), nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.AvgPool1d(2))
    start = drawn(model)
    with raises(NotApplicableError, "attack.no-class-layer"):
        bias_label(model, start, {name: torch.ones_like(value) for name, value in start.items()}, SHAPE)
