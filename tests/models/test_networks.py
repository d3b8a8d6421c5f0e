"""The networks of the papers have their sizes, and compute what the papers say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from umbel import models
from umbel.models.factors import INITIAL_SCALE
from umbel.models.networks import CNN, LeNet, TanhCNN


@pytest.mark.parametrize(
    # That for ten classes is ours: 52 classes less, each with 128 weights and a bias.
    ("name", "parameters", "loss", "metric"),
    [
        ("linear", 2, "mse", "rmse"),
        ("mlp", 11, "rmse", "rmse"),
        ("cnn", 1_206_590, "cross-entropy", "accuracy"),
        ("cnn10", 1_199_882, "cross-entropy", "accuracy"),
        ("cnn-dropout", 1_206_590, "cross-entropy", "accuracy"),
        ("tanh-cnn filters=16,32 hidden=32 outputs=10", 26_010, "cross-entropy", "accuracy"),
        ("tanh-cnn filters=64,128 hidden=512 outputs=10", 1_189_578, "cross-entropy", "accuracy"),
        ("lenet", 44_054, "cross-entropy", "accuracy"),
        ("lenet10", 13_426, "cross-entropy", "accuracy"),
    ],
)
def test_networks_have_the_sizes_and_losses_of_the_papers(name: str, parameters: int, loss: str, metric: str) -> None:
    model = models.load(name)
    assert (model.name, model.num_parameters, model.loss.name, model.metric.name) == (name, parameters, loss, metric)
    assert sum(value.size for value in model.initial(0).values()) == parameters


@pytest.mark.parametrize(
    ("name", "parameters", "rows", "expected"),
    [
        # Without an intercept: a row of zeros gives zeros.
        ("linear", [[[5, 6]]], [[0, 0], [1, -1], [0.5, 2]], [[0], [-1], [14.5]]),
        ("softmax features=2 classes=3", [[[1, 2], [0, -1], [3, 0]]], [[0, 0], [1, -2]], [[0, 0, 0], [-3, 2, 3]]),
        # Units relu(1), relu(2 + 3 - 1), then relu(-1), relu(0 + 0 - 1).
        (
            "mlp",
            [[[1, 0, 0], [0, 1, 1]], [0, -1], [[2, 3]], [0.5]],
            [[1, 2, 3], [-1, 0, 0]],
            [[2 * 1 + 3 * 4 + 0.5], [0.5]],
        ),
    ],
)
def test_outputs_by_hand(name: str, parameters: Any, rows: Any, expected: Any) -> None:
    model = models.load(name)
    named = {key: torch.tensor(value, dtype=torch.float32) for key, value in zip(model.shapes, parameters, strict=True)}
    assert model.apply(named, torch.tensor(rows, dtype=torch.float32)).tolist() == expected


@pytest.mark.parametrize(
    ("name", "law", "seeds"),
    [
        ("linear", stats.norm, 200),
        ("softmax features=100 classes=100", stats.norm(scale=0.01), 1),
        ("lenet10", stats.uniform(-0.5, 1.0), 1),
        ("factors items=500 size=8", stats.norm(scale=INITIAL_SCALE), 1),
    ],
)
def test_parameters_start_with_the_law_of_the_papers(name: str, law: Any, seeds: int) -> None:
    """False alarms once in a million."""
    drawn = [value.ravel() for seed in range(seeds) for value in models.load(name).initial(seed).values()]
    assert stats.kstest(np.concatenate(drawn), law.cdf).pvalue > 1e-6


def test_the_network_that_leaks_is_twice_differentiable() -> None:
    model, images = models.load("lenet10"), torch.rand(1, 28, 28, requires_grad=True)
    parameters = {name: torch.from_numpy(value) for name, value in model.initial(0).items()}
    (first,) = torch.autograd.grad(model.apply(parameters, images).sum(), images, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), images)
    assert (second != 0).all()


@pytest.mark.parametrize("kind", [CNN, LeNet, TanhCNN])
def test_the_image_networks_take_images_with_and_without_a_channel(kind: type[CNN | LeNet | TanhCNN]) -> None:
    network = kind() if kind is TanhCNN else kind(classes=10)
    images = torch.rand(3, 28, 28)
    with torch.inference_mode():
        flat, channelled = network(images), network(images.unsqueeze(1))
    assert flat.shape == (3, 10)
    assert torch.equal(flat, channelled)


@pytest.mark.parametrize(("relu", "smooth"), [("cnn", "cnn-sigmoid"), ("cnn10", "cnn10-sigmoid")])
def test_the_network_with_sigmoids_has_the_same_layers(relu: str, smooth: str) -> None:
    first, second = models.load(relu), models.load(smooth)
    assert first.shapes == second.shapes
    parameters = {name: torch.zeros(shape) for name, shape in first.shapes.items()}
    last = "fc2.weight"
    parameters[last] += 1
    image = torch.zeros(1, 28, 28)
    # Of zeros ReLU makes zeros, and a sigmoid halves, of which the last layer adds up 128.
    assert first.apply(parameters, image)[0, 0] == 0
    assert second.apply(parameters, image)[0, 0] == 64
