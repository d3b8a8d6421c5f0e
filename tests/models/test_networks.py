"""The networks of the papers have their sizes, and compute what the papers say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from umbel import models
from umbel.models import LOSSES, METRICS
from umbel.models.networks import CNN, LeNet, Linear, Softmax, TanhCNN


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
def test_networks_have_the_parameters_and_losses_that_the_papers_say(
    name: str, parameters: int, loss: str, metric: str
) -> None:
    model = models.load(name)
    assert (model.name, model.num_parameters, model.loss.name, model.metric.name) == (name, parameters, loss, metric)
    assert sum(value.size for value in model.initial(0).values()) == parameters


def test_the_linear_model_has_no_intercept() -> None:
    theta = {"weight": torch.tensor([[5.0, 6.0]])}
    inputs = torch.tensor([[0.0, 0.0], [1.0, -1.0], [0.5, 2.0]])
    assert models.load("linear").apply(theta, inputs).tolist() == [[0], [-1], [14.5]]


def test_the_hospital_network_is_two_rectified_units() -> None:
    parameters = {
        "0.weight": torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]),
        "0.bias": torch.tensor([0.0, -1.0]),
        "2.weight": torch.tensor([[2.0, 3.0]]),
        "2.bias": torch.tensor([0.5]),
    }
    # Units relu(1), relu(2 + 3 - 1), then relu(-1), relu(0 + 0 - 1).
    inputs = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 0.0]])
    assert models.load("mlp").apply(parameters, inputs).tolist() == [[2 * 1 + 3 * 4 + 0.5], [0.5]]


@pytest.mark.parametrize("kind", [CNN, LeNet, TanhCNN])
def test_the_image_networks_take_images_with_and_without_a_channel(kind: type[CNN | LeNet | TanhCNN]) -> None:
    network = kind() if kind is TanhCNN else kind(classes=10)
    images = torch.rand(3, 28, 28)
    with torch.inference_mode():
        flat, channelled = network(images), network(images.unsqueeze(1))
    assert flat.shape == (3, 10)
    assert torch.equal(flat, channelled)


def test_the_network_that_leaks_is_twice_differentiable_and_starts_uniformly() -> None:
    parameters = {name: torch.from_numpy(value) for name, value in models.load("lenet10").initial(0).items()}
    drawn = torch.cat([value.flatten() for value in parameters.values()])
    assert stats.kstest(drawn.numpy(), stats.uniform(-0.5, 1.0).cdf).pvalue > 1e-6
    images = torch.rand(1, 28, 28, requires_grad=True)
    (first,) = torch.autograd.grad(models.load("lenet10").apply(parameters, images).sum(), images, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), images)
    assert (second != 0).all()


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


def test_the_linear_model_starts_from_a_standard_normal() -> None:
    one_of_many = models.Model("wide", lambda: Linear(100_000), LOSSES["mse"], METRICS["rmse"]).initial(0)
    many = np.concatenate([models.load("linear").initial(seed)["weight"].ravel() for seed in range(200)])
    for draws in (one_of_many["weight"].ravel(), many):
        assert stats.kstest(draws, "norm").pvalue > 1e-6


# --- softmax


def test_softmax_gives_logits_that_are_linear_without_intercept() -> None:
    model = models.load("softmax features=2 classes=3", "cross-entropy")
    weight = torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 0.0]])
    outputs = model.apply({"linear.weight": weight}, torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
    assert outputs.tolist() == [[0, 0, 0], [-3, 2, 3]]


def test_softmax_starts_near_zero_and_each_hypothesis_elsewhere() -> None:
    model = models.load("softmax features=100 classes=100", "cross-entropy")
    one, other = (model.initial(seed)["linear.weight"] for seed in (0, 1))
    assert not np.array_equal(one, other)
    # 10,000 draws with standard deviation .01: their own is within 1 % of it, give or take.
    assert abs(one.std() - 0.01) < 4 * 0.01 / np.sqrt(2 * one.size)


def test_the_first_step_of_softmax_on_white_features_is_least_squares() -> None:
    generator = np.random.default_rng(0)
    rows = np.linalg.qr(generator.normal(size=(50, 4)))[0] * np.sqrt(50)
    rows = (rows - rows.mean(0)).astype(np.float32)
    classes = generator.integers(3, size=50)
    weight = torch.zeros(3, 4, requires_grad=True)
    network = Softmax(4, 3)
    outputs = torch.func.functional_call(network, {"linear.weight": weight}, (torch.from_numpy(rows),))
    torch.nn.functional.cross_entropy(outputs, torch.from_numpy(classes)).backward()
    assert weight.grad is not None
    step = -weight.grad.numpy()
    np.testing.assert_allclose(step, ((np.eye(3)[classes] - 1 / 3).T @ rows) / 50, atol=1e-6)
