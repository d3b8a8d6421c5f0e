"""Losses and metrics are what can be computed by hand, and what PyTorch computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.errors import raises
from tests.helpers.examples import examples
from tests.helpers.models import write_module
from umbel.models.losses import LOSSES, METRICS, SLOPES, load_loss, load_metric
from umbel.protocol.errors import ModelError

# --- by hand


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "expected"),
    [
        # Squared errors are summed over outputs; of classes the right one is to be 1.
        ("mse", [[1.0, 2], [0, 0]], [[0.0, 4.0], [3.0, -4.0]], [1 + 4, 9 + 16]),
        ("rmse", [[1.0, 2], [0, 3]], [0, 1], [4, 4]),
        # A single output takes targets without an axis for it, and whole numbers as numbers.
        ("mse", [[1.0], [5]], [3.0, 3.0], [4, 4]),
        ("mse", [[1.0], [5]], [3, -3], [4, 64]),
        ("cross-entropy", [[7.0] * 4], [2], [math.log(4)]),
        ("cross-entropy", [[1e30, 0.0], [-1e30, 0.0]], [0, 0], [0, 1e30]),
    ],
)
def test_losses_of_rows_by_hand(loss: str, outputs: Any, targets: Any, expected: list[float]) -> None:
    found = LOSSES[loss].per_sample(torch.tensor(outputs), torch.tensor(targets))
    assert found.tolist() == pytest.approx(expected)


def test_accuracy_counts_where_the_largest_output_is_the_class() -> None:
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    hits = METRICS["accuracy"].per_sample(outputs, torch.tensor([1, 1, 1]))
    assert hits.tolist() == [1, 0, 1]
    assert METRICS["accuracy"].report(hits.mean()).item() == pytest.approx(2 / 3)


@pytest.mark.parametrize(("loss", "gradient"), [("mse", [1, -7]), ("rmse", [0.1, -0.7])])
def test_gradients_of_both_squared_losses(loss: str, gradient: list[float]) -> None:
    # Two samples with residuals r = 1 and -7. The mean square m = (1 + 49) / 2 = 25 has the
    # gradient 2 r / 2 = r, and its root 5 has r / (2 * 5).
    outputs = torch.tensor([[1.0], [-7.0]], requires_grad=True)
    LOSSES[loss].objective(LOSSES[loss].per_sample(outputs, torch.zeros(2)).mean()).backward()
    assert outputs.grad is not None
    assert outputs.grad.flatten().tolist() == pytest.approx(gradient)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_the_gradient_at_a_perfect_fit_is_finite(loss: str) -> None:
    theta = torch.tensor([[1.0, 0.0]], requires_grad=True)
    mean = LOSSES[loss].per_sample(theta, torch.tensor([0])).mean()
    LOSSES[loss].objective(mean).backward()
    assert theta.grad is not None
    assert torch.isfinite(theta.grad).all()
    if loss != "cross-entropy":
        assert theta.grad.tolist() == [[0, 0]]


# --- losses of the margin

losses = pytest.mark.parametrize("loss", list(SLOPES))


def loss_of(name: str, margin: float, label: int = 1) -> float:
    score, target = torch.tensor([[margin * label]], dtype=torch.float64), torch.tensor([label])
    (value,) = LOSSES[name].per_sample(score, target).tolist()
    return float(value)


@pytest.mark.parametrize(
    ("loss", "at_minus_one", "at_zero", "at_two"),
    [("log", math.log(1 + math.e), math.log(2), math.log(1 + math.exp(-2))), ("hinge", 2, 1, 0), ("margin", 1, 0, -2)],
)
@pytest.mark.parametrize("label", [-1, 1])
def test_losses_by_hand(loss: str, at_minus_one: float, at_zero: float, at_two: float, label: int) -> None:
    found = [loss_of(loss, margin, label) for margin in (-1.0, 0.0, 2.0)]
    assert found == pytest.approx([at_minus_one, at_zero, at_two], rel=1e-12)


@losses
@settings(max_examples=examples(40))
@given(margin=st.floats(-30, 30).filter(lambda z: abs(z - 1) > 1e-3))
def test_a_slope_is_the_derivative_of_its_loss(loss: str, margin: float) -> None:
    step = 1e-4  # the hinge has its kink at 1, where it has no derivative
    numeric = (loss_of(loss, margin + step) - loss_of(loss, margin - step)) / (2 * step)
    assert SLOPES[loss](np.array([margin]))[0] == pytest.approx(numeric, abs=1e-6)


def test_the_slope_of_the_log_loss_does_not_overflow() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert SLOPES["log"](np.array([-1e4, 1e4], np.float32)).tolist() == [-1, 0]


def test_a_sign_is_right_where_score_and_label_agree_and_no_score_is_wrong() -> None:
    scores, labels = torch.tensor([[2.0], [2.0], [-2.0], [-2.0], [0.0]]), torch.tensor([1, -1, 1, -1, 1])
    assert METRICS["right-sign"].per_sample(scores, labels).tolist() == [1, 0, 0, 1, 0]


# --- by import path


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "axes", "expected"),
    [
        # Half the square below 1, the distance less a half above.
        ("huber_loss", [[0.0], [0.0]], [0.5, 3.0], 1, [0.125, 2.5]),
        ("cross_entropy", [[0.0, 0.0], [5.0, 5.0]], [1, 0], 1, [math.log(2)] * 2),
        # A row comes in the shapes of a batch: the classes of an image's places are on the second axis.
        ("cross_entropy", np.zeros((2, 3, 4, 4), np.float32), np.zeros((2, 4, 4), int), 1, [math.log(3)] * 2),
        # Clients are an axis before their rows.
        ("l1_loss", np.arange(6.0).reshape(2, 3, 1), np.zeros((2, 3)), 2, [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_a_function_of_pytorchs_is_a_loss(name: str, outputs: Any, targets: Any, axes: int, expected: Any) -> None:
    loss = load_loss(f"torch.nn.functional:{name}")
    found = loss.of_rows(torch.as_tensor(outputs), torch.as_tensor(targets), axes)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_metric_says_whether_more_of_it_is_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def hits(outputs, targets):\n    return (outputs > 0).float()\nhits.higher_is_better = True\n"
    name = write_module(tmp_path, monkeypatch, source)
    assert load_metric(f"{name}:hits").higher_is_better
    assert not load_metric("torch.nn.functional:l1_loss").higher_is_better


@pytest.mark.parametrize("name", ["torch.nn:MSELoss", "torch:float32"])
def test_what_is_no_function_is_no_loss(name: str) -> None:
    with raises(ModelError, "model.not-a-function", f"'{name}'"):
        load_loss(name)
