"""What a layer's gradient tells of its input, and of its class: exactly without noise, and much of it with noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.errors import raises
from umbel import models
from umbel.models.losses import LOSSES, METRICS
from umbel.models.model import Model
from umbel.protocol.errors import NotApplicableError
from umbel_lab.attacks.quality import correlation, psnr
from umbel_lab.attacks.rank_one import (
    bias_label,
    dense_layers,
    inputs_of_layers,
    invert_first_layer,
    label_given_image,
    leading_input,
    parameter,
)  # fmt: skip

from .conftest import SHAPE, chain, drawn, gradient_of, noisy

pytestmark = pytest.mark.rest

PICTURE = torch.zeros(28, 28)


# --- the image


def test_the_input_is_read_off_an_outer_product() -> None:
    """The bias tells its sign; without one, inputs are taken to be mostly positive."""
    for sign in (1.0, -1.0):
        delta, x = torch.tensor([3.0, -4.0]), sign * torch.tensor([2.0, 2.0])
        direction, noise = leading_input(torch.outer(delta, x), delta)
        # (x, 1) has the length 3.
        torch.testing.assert_close(direction, torch.tensor([sign * 2.0, sign * 2.0, 1.0]).double() / 3)
        assert noise == pytest.approx(0, abs=1e-12)
    x = torch.tensor([4.0, 0.0, 3.0])
    direction, _ = leading_input(torch.outer(torch.tensor([-3.0, -4.0]), x), None)
    torch.testing.assert_close(direction, x.double() / 5)


PICTURE[6:22, 12:16] = PICTURE[18:22, 12:22] = 1.0


def test_the_other_singular_values_tell_how_much_noise_there_is() -> None:
    # 100 rows of deviation .01 an entry, averaged with weights of length 1, leave 1000 entries of that
    # deviation in a vector of length |delta| |x| = 10.
    generator = torch.Generator().manual_seed(0)
    x = nn.functional.normalize(torch.rand(1000, generator=generator), dim=0)
    gradient = torch.outer(torch.ones(100), x) + 0.01 * torch.randn(100, 1000, generator=generator)
    direction, noise = leading_input(gradient, None)
    assert noise == pytest.approx(1000 * 0.01**2 / 10**2, rel=0.1)
    assert 1 - float(direction @ x.double()) ** 2 == pytest.approx(noise, rel=0.2)


DENSE = (nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))
BEHIND = (nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))


@pytest.mark.parametrize(("layers", "label", "least"), [(DENSE, 2, 50), (BEHIND, 0, 30)])
def test_an_image_is_read_with_its_contrast_and_layers_before_are_inverted(
    image: Tensor, layers: tuple[nn.Module, ...], label: int, least: float
) -> None:
    model = chain(*layers)
    start = drawn(model)
    found = invert_first_layer(model, start, gradient_of(model, start, image, label), SHAPE)
    assert psnr(found.numpy(), image.numpy()) > least
    found = invert_first_layer(model, start, {name: torch.zeros_like(value) for name, value in start.items()}, SHAPE)
    assert ((found >= 0) & (found <= 1)).all(), "a gradient of 0 shows nothing, and gives some image in range"


@pytest.mark.parametrize(("network", "paper", "share"), [("lenet10", 0, 0), ("lenet10", 1, 0), ("cnn10", 0, 3)])
def test_a_network_is_inverted_whatever_the_paper_and_with_noise(network: str, paper: int, share: float) -> None:
    """From a light grey the one on black would have 10 dB so soon, from a dark one the one on white 8. With noise, at
    nu = 3, a made-up image on the paper's ReLU network stays to be seen, which plain DLG cannot do."""
    model = models.load(network)
    start = {name: torch.from_numpy(value) for name, value in model.initial(0).items()}
    shown = 1 - PICTURE if paper else PICTURE
    gradient = gradient_of(model, start, shown, 1 if share else 0)
    found = invert_first_layer(model, start, noisy(gradient, share=share), (28, 28), iterations=60).numpy()
    if share:
        assert correlation(found, shown.numpy()) > 0.9
    else:
        assert psnr(found, shown.numpy()) > (12 if paper else 20)


# --- the layers, and the class that the last one shows


class Backwards(nn.Module):
    """Runs its layers in another order than it names them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.first = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(images.flatten(1)))
        return logits


def test_layers_come_in_the_order_in_which_they_run_and_no_hook_stays(image: Tensor) -> None:
    model = Model("backwards", Backwards, LOSSES["cross-entropy"], METRICS["accuracy"])
    assert dense_layers(model, drawn(model), SHAPE) == ["first", "last"]
    with inputs_of_layers(model) as seen:
        model.apply(drawn(model), image[None])
        assert torch.equal(seen["first"], image.reshape(1, 16))
    assert not any(layer._forward_pre_hooks for layer in model.module.modules())
    model = Model("one", lambda: nn.Linear(4, 3), LOSSES["cross-entropy"], METRICS["accuracy"])
    assert dense_layers(model, drawn(model), (4,)) == [""]
    assert (parameter("", "weight"), parameter("fc", "bias")) == ("weight", "fc.bias")


NO_DENSE = (nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 3, 4), nn.Flatten())
EVERY_ROW = (nn.Linear(4, 2), nn.Flatten())
NO_CLASSES = (nn.Flatten(), nn.Linear(16, 6), nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.AvgPool1d(2))
NO_BIAS = (nn.Flatten(), nn.Linear(16, 3, bias=False))


@pytest.mark.parametrize(
    ("layers", "code", "part"),
    [
        (NO_DENSE, "attack.no-dense-layer", "chain"),
        (EVERY_ROW, "attack.no-dense-layer", "4 vec"),
        (NO_CLASSES, "attack.no-class-layer", ""),
        (NO_BIAS, "attack.no-bias", "chain"),
    ],
)
def test_networks_whose_gradient_does_not_tell_are_refused(layers: tuple[nn.Module, ...], code: str, part: str) -> None:
    model = chain(*layers)
    start = drawn(model)
    with raises(NotApplicableError, code, part):
        bias_label(model, start, {name: torch.ones_like(value) for name, value in start.items()}, SHAPE)


def network(bias: bool = True) -> Model:
    return chain(nn.Flatten(), nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 10, bias=bias))


def test_without_noise_every_label_is_read_and_without_a_bias_the_weights_tell(image: Tensor) -> None:
    for bias, label in [*((True, label) for label in range(10)), (False, 7)]:
        model = network(bias)
        start = drawn(model, scale=0.1)
        gradient = gradient_of(model, start, image, label)
        assert label_given_image(model, start, gradient, image) == label
        if bias:
            assert (gradient["3.bias"] < 0).tolist() == [j == label for j in range(10)]
            assert bias_label(model, start, gradient, SHAPE) == label


def test_with_a_guess_at_the_image_the_whole_layer_tells_more_than_its_bias(image: Tensor) -> None:
    model = network()
    start = drawn(model, scale=0.1)
    gradient = gradient_of(model, start, image, 4)
    tries = [noisy(gradient, share=3.0, seed=seed) for seed in range(50)]
    assert sum(bias_label(model, start, one, SHAPE) == 4 for one in tries) < 30
    assert sum(label_given_image(model, start, one, 0.5 * image + 0.25) == 4 for one in tries) > 45
