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
from torch import Tensor

from tests.helpers.errors import raises
from tests.helpers.examples import examples
from tests.helpers.models import write_module
from umbel.models.losses import LOSSES, METRICS, SLOPES, load_loss, load_metric
from umbel.protocol.errors import ModelError

# --- by hand


def per_sample(loss: str, outputs: list[list[float]], targets: Tensor) -> list[float]:
    values: list[float] = LOSSES[loss].per_sample(torch.tensor(outputs), targets).tolist()
    return values


@pytest.mark.parametrize("loss", ["mse", "rmse"])
def test_squared_error_is_summed_over_outputs(loss: str) -> None:
    assert per_sample(loss, [[1, 2], [0, 0]], torch.tensor([[0.0, 4.0], [3.0, -4.0]])) == [1 + 4, 9 + 16]
    assert per_sample(loss, [[1, 2], [0, 3]], torch.tensor([0, 1])) == [4, 4], "of classes, from 1 for the right one"


def test_squared_error_of_one_output_takes_targets_without_an_axis_for_it_and_whole_numbers_as_numbers() -> None:
    assert per_sample("mse", [[1], [5]], torch.tensor([3.0, 3.0])) == [4, 4]
    assert per_sample("mse", [[1], [5]], torch.tensor([3, -3])) == [4, 64]


def test_cross_entropy_of_even_odds_is_the_logarithm_of_the_number_of_classes() -> None:
    assert per_sample("cross-entropy", [[7.0] * 4], torch.tensor([2])) == pytest.approx([np.log(4)])


def test_cross_entropy_does_not_overflow() -> None:
    assert per_sample("cross-entropy", [[1e30, 0.0], [-1e30, 0.0]], torch.tensor([0, 0])) == pytest.approx([0, 1e30])


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
    """Return the loss of a score that has the given margin for a label."""
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


@pytest.mark.parametrize(("loss", "slope"), [("log", -0.5), ("hinge", -1), ("margin", -1)])
def test_the_slope_at_zero_is_not_zero(loss: str, slope: float) -> None:
    """Assumption 2 of the paper."""
    assert SLOPES[loss](np.zeros(1, np.float32)).tolist() == [slope]


def test_the_slope_of_the_log_loss_does_not_overflow() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert SLOPES["log"](np.array([-1e4, 1e4], np.float32)).tolist() == [-1, 0]


def test_a_sign_is_right_where_score_and_label_agree_and_no_score_is_wrong() -> None:
    scores, labels = torch.tensor([[2.0], [2.0], [-2.0], [-2.0], [0.0]]), torch.tensor([1, -1, 1, -1, 1])
    assert METRICS["right-sign"].per_sample(scores, labels).tolist() == [1, 0, 0, 1, 0]


# --- by import path


def rows_of(name: str, outputs: Any, targets: Any, axes: int = 1) -> list[Any]:
    """Return the value of each row under a loss by import path."""
    values: list[Any] = load_loss(name).of_rows(torch.tensor(outputs), torch.tensor(targets), axes).tolist()
    return values


def test_a_function_of_pytorchs_is_a_loss() -> None:
    """Half the square below 1, the distance less a half above."""
    assert rows_of("torch.nn.functional:huber_loss", [[0.0], [0.0]], [0.5, 3.0]) == [0.125, 2.5]
    log2 = pytest.approx(np.log(2))
    assert rows_of("torch.nn.functional:cross_entropy", [[0.0, 0.0], [5.0, 5.0]], [1, 0]) == [log2, log2]


def test_it_sees_a_row_in_the_shapes_of_a_batch() -> None:
    """PyTorch's cross entropy has the classes of an image's places on the second axis."""
    outputs = np.zeros((2, 3, 4, 4), np.float32)
    values = rows_of("torch.nn.functional:cross_entropy", outputs, np.zeros((2, 4, 4), np.int64))
    assert values == [pytest.approx(np.log(3))] * 2


def test_clients_are_an_axis_before_their_rows() -> None:
    outputs, targets = np.arange(6, dtype=np.float32).reshape(2, 3, 1), np.zeros((2, 3), np.float32)
    assert rows_of("torch.nn.functional:l1_loss", outputs, targets, 2) == [[0, 1, 2], [3, 4, 5]]


def test_a_metric_says_whether_more_of_it_is_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def hits(outputs, targets):\n    return (outputs > 0).float()\nhits.higher_is_better = True\n"
    name = write_module(tmp_path, monkeypatch, source)
    assert load_metric(f"{name}:hits").higher_is_better
    assert not load_metric("torch.nn.functional:l1_loss").higher_is_better


@pytest.mark.parametrize("name", ["torch.nn:MSELoss", "torch:float32"])
def test_what_is_no_function_is_no_loss(name: str) -> None:
    with raises(ModelError, "model.not-a-function", f"'{name}'"):
        load_loss(name)
