"""A linear layer on fixed features has no intercept, and starts near 0."""

from __future__ import annotations

import numpy as np
import torch

from umbel import models
from umbel.models.networks import Softmax


def test_logits_are_linear_without_intercept() -> None:
    model = models.load("softmax features=2 classes=3", "cross-entropy")
    weight = torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 0.0]])
    outputs = model.apply({"linear.weight": weight}, torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
    assert outputs.tolist() == [[0, 0, 0], [-3, 2, 3]]


def test_it_starts_near_zero_and_each_hypothesis_elsewhere() -> None:
    model = models.load("softmax features=100 classes=100", "cross-entropy")
    one, other = (model.initial(seed)["linear.weight"] for seed in (0, 1))
    assert not np.array_equal(one, other)
    # 10,000 draws with standard deviation .01: their own is within 1 % of it, give or take.
    assert abs(one.std() - 0.01) < 4 * 0.01 / np.sqrt(2 * one.size)


def test_the_first_step_on_white_features_is_least_squares() -> None:
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
