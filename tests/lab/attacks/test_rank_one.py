"""What a layer's gradient tells of its input: exactly without noise, and much of it with noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from umbel import models
from umbel_lab.attacks.quality import correlation, psnr
from umbel_lab.attacks.rank_one import invert_first_layer, leading_input, total_variation

from .conftest import SHAPE, chain, drawn, gradient_of, noisy

pytestmark = pytest.mark.rest

PICTURE = torch.zeros(28, 28)
PICTURE[6:22, 12:16] = PICTURE[18:22, 12:22] = 1.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_input_is_read_off_an_outer_product_and_the_bias_tells_its_sign(sign: float) -> None:
    delta, x = torch.tensor([3.0, -4.0]), sign * torch.tensor([2.0, 2.0])
    direction, noise = leading_input(torch.outer(delta, x), delta)
    # (x, 1) has the length 3.
    torch.testing.assert_close(direction, torch.tensor([sign * 2.0, sign * 2.0, 1.0]).double() / 3)
    assert noise == pytest.approx(0, abs=1e-12)


def test_without_a_bias_inputs_are_taken_to_be_mostly_positive() -> None:
    x = torch.tensor([4.0, 0.0, 3.0])
    direction, _ = leading_input(torch.outer(torch.tensor([-3.0, -4.0]), x), None)
    torch.testing.assert_close(direction, x.double() / 5)


def test_the_other_singular_values_tell_how_much_noise_there_is() -> None:
    # 100 rows of deviation .01 an entry, averaged with weights of length 1, leave 1000 entries of that
    # deviation in a vector of length |delta| |x| = 10.
    generator = torch.Generator().manual_seed(0)
    x = nn.functional.normalize(torch.rand(1000, generator=generator), dim=0)
    gradient = torch.outer(torch.ones(100), x) + 0.01 * torch.randn(100, 1000, generator=generator)
    direction, noise = leading_input(gradient, None)
    assert noise == pytest.approx(1000 * 0.01**2 / 10**2, rel=0.1)
    assert 1 - float(direction @ x.double()) ** 2 == pytest.approx(noise, rel=0.2)


def test_total_variation_counts_steps_down_and_across(image: Tensor) -> None:
    assert total_variation(torch.full((3, 3), 0.5)).item() == pytest.approx(0, abs=3e-3)
    edge = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert total_variation(edge).item() == pytest.approx(1, abs=3e-3)


def test_an_image_that_goes_straight_into_the_layer_is_read_with_its_contrast(image: Tensor) -> None:
    model = chain(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))
    start = drawn(model)
    found = invert_first_layer(model, start, gradient_of(model, start, image, 2), SHAPE)
    assert psnr(found.numpy(), image.numpy()) > 50


def test_layers_before_it_are_inverted(image: Tensor) -> None:
    model = chain(nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
    start = drawn(model)
    found = invert_first_layer(model, start, gradient_of(model, start, image, 0), SHAPE)
    assert found.shape == SHAPE
    assert psnr(found.numpy(), image.numpy()) > 30


@pytest.mark.parametrize(("paper", "least"), [("black", 20), ("white", 12)])
def test_whatever_the_paper_a_smooth_network_is_inverted(paper: str, least: float) -> None:
    """From a light grey the one on black would have 10 dB so soon, from a dark one the one on white 8."""
    model = models.load("lenet10")
    start = {name: torch.from_numpy(value) for name, value in model.initial(0).items()}
    shown = PICTURE if paper == "black" else 1 - PICTURE
    found = invert_first_layer(model, start, gradient_of(model, start, shown, 0), (28, 28), iterations=60)
    assert psnr(found.numpy(), shown.numpy()) > least


def test_noise_as_large_as_the_gradient_leaves_the_image_to_be_seen() -> None:
    """What plain DLG cannot do: here on the paper's ReLU network, with a made-up image and noise at nu = 3."""
    model = models.load("cnn10")
    start = {name: torch.from_numpy(value) for name, value in model.initial(0).items()}
    gradient = noisy(gradient_of(model, start, PICTURE, 1), share=3.0)
    found = invert_first_layer(model, start, gradient, (28, 28), iterations=60)
    assert correlation(found.numpy(), PICTURE.numpy()) > 0.9


def test_a_gradient_of_0_shows_nothing_and_gives_some_image_in_range() -> None:
    direction, noise = leading_input(torch.zeros(3, 4), torch.zeros(3))
    assert not direction.any()
    assert noise == 1
    model = chain(nn.Flatten(), nn.Linear(16, 3))
    start = drawn(model)
    found = invert_first_layer(model, start, {name: torch.zeros_like(value) for name, value in start.items()}, SHAPE)
    assert ((found >= 0) & (found <= 1)).all()
