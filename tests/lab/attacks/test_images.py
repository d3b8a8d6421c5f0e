"""What a gradient tells of its image and class: measures by hand, the attacks, and the audit through the real gate."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from umbel import models
from umbel.data import offsets_of, write_dataset
from umbel.models.losses import LOSSES, METRICS
from umbel.models.model import Model, Parameters
from umbel.protocol.errors import FleetError, NotApplicableError, UmbelError
from umbel_lab.attacks import reconstruct
from umbel_lab.attacks.__main__ import app
from umbel_lab.attacks.dlg import deep_leakage
from umbel_lab.attacks.quality import correlation, psnr, ssim, verdict
from umbel_lab.attacks.rank_one import (
    bias_label,
    dense_layers,
    inputs_of_layers,
    invert_first_layer,
    label_given_image,
    leading_input,
    parameter,
)
from umbel_lab.attacks.reconstruct import DLG, LAST_BIAS, RANK_ONE, Setting, audit

pytestmark = pytest.mark.rest


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


# --- measures, by hand


PICTURE = np.random.default_rng(0).random((28, 28))


def test_psnr_by_hand() -> None:
    for image, original, decibels in (
        (np.full((2, 2), 0.4), np.full((2, 2), 0.5), 20),  # a tenth off everywhere
        (np.zeros((2, 2)), np.ones((2, 2)), 0),
        (PICTURE, PICTURE, math.inf),
        (np.eye(10), np.zeros((10, 10)), 10),  # ten wrong pixels of a hundred
    ):
        assert psnr(image, original) == pytest.approx(decibels)


def test_ssim_by_hand() -> None:
    # Of two greys it is the luminance term alone: without variance the second factor is c2 / c2; c1 = .01^2.
    luminance = (2 * 0.25 * 0.5 + 1e-4) / (0.25**2 + 0.5**2 + 1e-4)
    assert ssim(np.full((11, 11), 0.25), np.full((11, 11), 0.5)) == pytest.approx(luminance)
    # One window of an 11x11 image, its weights the outer product of a Gaussian of deviation 1.5.
    x, y = np.random.default_rng(1).random((2, 11, 11))
    g = np.array([math.exp(-(i * i) / 4.5) for i in range(-5, 6)])
    w = np.outer(g, g) / g.sum() ** 2
    mx, my = (w * x).sum(), (w * y).sum()
    vx, vy, cov = (w * (x - mx) ** 2).sum(), (w * (y - my) ** 2).sum(), (w * (x - mx) * (y - my)).sum()
    expected = (2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
    assert ssim(x, y) == pytest.approx(expected)
    assert ssim(PICTURE, PICTURE) == pytest.approx(1)
    assert ssim(1 - PICTURE, PICTURE) < 0


def test_correlation_knows_neither_scale_nor_brightness() -> None:
    assert correlation(0.3 * PICTURE + 0.2, PICTURE) == pytest.approx(1)
    assert correlation(1 - PICTURE, PICTURE) == pytest.approx(-1)
    assert correlation(np.full((28, 28), 0.5), PICTURE) == 0
    guesses = {0.099: "full", 0.101: "partial"}  # 20.1 dB, and 19.9 dB, but the same shape
    assert {off: verdict(PICTURE + off, PICTURE) for off in guesses} == guesses
    assert verdict(np.full((28, 28), 0.5), PICTURE) == verdict(1 - PICTURE, PICTURE) == "none"


# --- a layer's gradient


STROKE = torch.zeros(28, 28)
STROKE[6:22, 12:16] = STROKE[18:22, 12:22] = 1.0


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
    shown = 1 - STROKE if paper else STROKE
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


def test_labels_are_read_and_with_noise_the_whole_layer_tells_more_than_its_bias(image: Tensor) -> None:
    """Given a guess at the image; without a bias the weights tell."""
    for bias, label in [*((True, label) for label in range(10)), (False, 7)]:
        model = chain(nn.Flatten(), nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 10, bias=bias))
        start = drawn(model, scale=0.1)
        gradient = gradient_of(model, start, image, label)
        assert label_given_image(model, start, gradient, image) == label
        if bias:
            assert bias_label(model, start, gradient, SHAPE) == label
        if label == 4:
            tries = [noisy(gradient, share=3.0, seed=seed) for seed in range(50)]
            assert sum(bias_label(model, start, one, SHAPE) == 4 for one in tries) < 30
            assert sum(label_given_image(model, start, one, 0.5 * image + 0.25) == 4 for one in tries) > 45


# --- gradient matching


def test_a_gradient_of_unknown_length_is_matched_by_its_direction_and_any_gives_some_image(image: Tensor) -> None:
    """As of an update that was clipped: the squared distance finds nothing, the cosine does."""
    model = chain(nn.Flatten(), nn.Linear(16, 12), nn.Sigmoid(), nn.Linear(12, 3))
    start = drawn(model, scale=0.5)

    def matched(gradient: Parameters, *more: int) -> Any:
        return deep_leakage(model, start, gradient, SHAPE, torch.Generator().manual_seed(0), *more)

    clipped = {name: 0.01 * value for name, value in gradient_of(model, start, image, 1).items()}
    once, twice = (matched(clipped, starts, 150) for starts in (1, 2))
    assert once.distance > 1e-3 > 1e-5 > twice.distance
    assert psnr(twice.image.numpy(), image.numpy()) > 30 > psnr(once.image.numpy(), image.numpy())
    assert int(twice.label.argmax()) == 1
    for value in (0.0, 1e30):
        match = matched({name: torch.full_like(array, value) for name, array in start.items()}, 1, 20)
        assert torch.isfinite(match.image).all()


# --- the audit


NETWORK = """
from torch import nn

def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.Sigmoid(), nn.Linear(12, 10))

def convolutional():
    return nn.Sequential(nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 10, 28), nn.Flatten())
"""


@pytest.fixture
def blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """The setting of an audit of six clients with two made-up images each, on a network of the user's own."""
    rng = np.random.default_rng(0)
    images = np.zeros((12, 28, 28), np.uint8)
    for image in images:
        row, column = rng.integers(4, 16, 2)
        image[row : row + 8, column : column + 8] = 255
    own = manifest(4, 2, name="blobs", feature_scale=1 / 255)
    write_dataset(tmp_path / "blobs", own, images, np.arange(12) % 10, offsets_of([2] * 6))
    (tmp_path / "greenhouse.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    return Setting(str(tmp_path / "blobs"), "greenhouse:dense", (0.0, 1.0), images=2, restarts=1)


@pytest.fixture
def short_dlg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop DLG, the slow attack, long before it finds anything."""
    monkeypatch.setattr(reconstruct, "deep_leakage", partial(reconstruct.deep_leakage, iterations=10))


@pytest.fixture
def without_rank_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the attack on the first layer find nothing at once."""
    monkeypatch.setattr(reconstruct, "invert_first_layer", lambda *_: torch.zeros(28, 28))


@pytest.mark.usefixtures("short_dlg", "without_rank_one")
def test_what_is_attacked_is_a_clients_gradient_with_its_noise(blobs: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Parameters] = []
    monkeypatch.setattr(reconstruct, "bias_label", lambda _model, _start, gradient, _shape: seen.append(gradient) or 0)
    secret = audit(replace(blobs, noise_multipliers=(0.0, 2.0), images=4)).secret
    assert len({image.tobytes() for image in secret.images}) == len(secret.labels) == 4
    # The rest is the four images of the two validation clients, each with 64 white pixels.
    assert secret.average.sum() == pytest.approx(64)
    model = models.load("greenhouse:dense", "cross-entropy")
    start = {name: torch.from_numpy(value) for name, value in model.initial(0).items()}
    for found, image, label in zip(seen[:4], secret.images, secret.labels, strict=True):
        for name, value in gradient_of(model, start, torch.from_numpy(image), int(label)).items():
            torch.testing.assert_close(found[name].float(), value, rtol=1e-3, atol=1e-6)
    for clean, noisy in zip(seen[:4], seen[4:], strict=True):
        for layer in (1, 3):
            before, after = (torch.cat([g[f"{layer}.weight"].flatten(), g[f"{layer}.bias"]]) for g in (clean, noisy))
            assert (after - before).norm() / before.norm() == pytest.approx(2, rel=0.3)


def test_without_noise_everything_is_found(blobs: Setting) -> None:
    done = audit(replace(blobs, noise_multipliers=(0.0,)))
    for name in (DLG, RANK_ONE):
        pairs = zip(done.shown[name, 0.0], done.secret.images, strict=True)
        assert [verdict(*pair) for pair in pairs] == ["full", "full"]
    labels = [(row["attack"], row["label"]) for row in done.rows[1:]]
    assert labels == [(DLG, 1.0), (RANK_ONE, 1.0), (LAST_BIAS, 1.0)]


@pytest.mark.usefixtures("short_dlg")
def test_a_seed_gives_the_same_audit_and_an_attack_that_cannot_be_made_says_why(blobs: Setting) -> None:
    setting = replace(blobs, noise_multipliers=(1.0,), images=1)
    first, again, other = (audit(replace(setting, seed=seed)) for seed in (0, 0, 1))
    assert first.rows == again.rows
    for key, images in first.shown.items():
        np.testing.assert_array_equal(images, again.shown[key])
        assert (images != other.shown[key]).any()
    done = audit(replace(setting, model="greenhouse:convolutional"))
    assert {*done.shown} == {(DLG, 1.0)}
    for name in (RANK_ONE, LAST_BIAS):
        (why,) = (obstacle for obstacle in done.obstacles if obstacle.startswith(name))
        assert "has no fully connected layer" in why


@pytest.mark.parametrize(
    ("changes", "features", "targets", "code"),
    [
        ({"dataset": "roses"}, None, None, "data.unknown"),
        ({"model": "rose"}, None, None, "model.unknown"),
        ({"model": "linear"}, None, None, "model.input-shape"),
        ({"images": 5}, None, None, "data.too-few-clients"),
        ({"images": 0}, None, None, "config.out-of-range"),
        ({"noise_multipliers": (1.0, float("nan"))}, None, None, "protocol.wrong-value"),
        ({"noise_multipliers": (-1.0,)}, None, None, "protocol.wrong-value"),
        ({}, np.zeros((4, 3)), np.zeros(4, int), "data.not-images"),
        ({}, np.zeros((4, 28, 28), np.float32), np.zeros(4, np.float32), "data.not-classes"),
        ({}, np.zeros((4, 28, 28), np.float32), np.array([0, 1, 2, 10]), "model.too-few-classes"),
        ({}, np.full((4, 28, 28), 255, np.float32), np.zeros(4, int), "data.pixel-range"),
    ],
)
def test_what_cannot_be_is_told_before_any_work(
    blobs: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], features: Any,
    targets: Any, code: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(reconstruct, "_write_victims", lambda *_: pytest.fail("work was begun"))
    if features is not None:
        write_dataset(tmp_path / "other", manifest(4), features, targets, offsets_of([1] * 4))
        changes = {"dataset": str(tmp_path / "other")}
    with pytest.raises(UmbelError) as told:
        audit(replace(blobs, **changes))
    assert told.value.code == code


@pytest.mark.usefixtures("short_dlg")
def test_the_command_prints_the_table_and_writes_what_it_says(
    blobs: Setting, umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["reconstruct", "--dataset", blobs.dataset, "--model", blobs.model, "--restarts", "1"]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*words, "--images", "1", "--noise-multiplier", "3"])
    assert done.exit_code == 0, done.output
    folder = umbel_home / "audits" / "reconstruct-blobs-greenhouse-dense"
    assert done.output.splitlines()[-1] == str(folder / "table.md")
    names = ["reconstructions.png", "reconstructions.svg", "table.csv", "table.md"]
    assert sorted(file.name for file in folder.iterdir()) == names
    done = CliRunner().invoke(app, [*words, "--images", "5"])
    assert (done.exit_code, "[data.too-few-clients]" in done.output) == (3, True)
    monkeypatch.setenv("UMBEL_MIN_NOISE_MULTIPLIER", "1")
    with raises(FleetError, "nodes.refused"):
        audit(blobs)
