"""The class is the one negative entry of the last layer's gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from umbel.models.model import Model
from umbel.protocol.errors import NotApplicableError
from umbel.research.attacks.label import bias_label, label_given_image

from .conftest import SHAPE, chain, drawn, gradient_of, noisy


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
    with pytest.raises(NotApplicableError, match="last fully connected layer of model 'chain' has no bias"):
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
    with pytest.raises(NotApplicableError, match="does not put out the classes"):
        bias_label(model, start, {name: torch.ones_like(value) for name, value in start.items()}, SHAPE)
