"""The factor model and its losses: what they are, and that their slopes are their derivatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import models
from models import LOSSES, METRICS
from models.factors import INITIAL_SCALE, SLOPES, Factors

FALSE_ALARM = 1e-6

losses = pytest.mark.parametrize("loss", list(SLOPES))


def loss_of(name: str, margin: float, label: int = 1) -> float:
    """Return the loss of a score that has the given margin for a label."""
    score, target = torch.tensor([[margin * label]], dtype=torch.float64), torch.tensor([label])
    (value,) = LOSSES[name].per_sample(score, target).tolist()
    return float(value)


# --- the network


def test_an_item_is_looked_up_by_its_number() -> None:
    factors = Factors(3, 2)
    items = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    factors.load_state_dict({"items": items})
    assert factors(torch.tensor([[2.0], [0.0], [2.0]])).tolist() == [[4, 5], [0, 1], [4, 5]]


def test_the_size_is_in_the_name() -> None:
    model = models.load("factors-12x3")
    assert model.shapes == {"items": (12, 3)}
    assert (model.num_parameters, model.local_size) == (36, 3)
    assert (model.loss.name, model.metric.name) == ("log", "right-sign")


@pytest.mark.parametrize(
    "name", ["factors-0x3", "factors-3x0", "factors-3", "factors-03x1", "factors-3x3x3", "factors-"]
)
def test_a_size_that_makes_no_sense_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown model '{name}'"):
        models.load(name)


def test_other_models_have_no_local_part() -> None:
    assert [models.load(name).local_size for name in models.MODELS] == [0] * len(models.MODELS)


@losses
def test_the_loss_of_a_factor_model_is_one_of_the_margin(loss: str) -> None:
    assert models.load("factors-3x2", loss).loss is LOSSES[loss]


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - set(SLOPES)))
def test_another_loss_is_refused_with_those_there_are(loss: str) -> None:
    with pytest.raises(ValueError, match=f"needs a loss of the margin, not '{loss}'; choose from log, hinge, margin"):
        models.load("factors-3x2", loss)


def test_fresh_items_are_normal_about_zero() -> None:
    """Components ~ N(0, .1^2). False-alarm rate 1e-6."""
    items = models.load("factors-500x8").initial(5)["items"]
    assert items.shape == (500, 8)
    assert stats.kstest(items.ravel(), stats.norm(scale=INITIAL_SCALE).cdf).pvalue > FALSE_ALARM


# --- the losses


@pytest.mark.parametrize(
    ("loss", "at_minus_one", "at_zero", "at_two"),
    [
        ("log", math.log(1 + math.e), math.log(2), math.log(1 + math.exp(-2))),
        ("hinge", 2, 1, 0),
        ("margin", 1, 0, -2),
    ],
)
@pytest.mark.parametrize("label", [-1, 1])
def test_losses_by_hand(loss: str, at_minus_one: float, at_zero: float, at_two: float, label: int) -> None:
    found = [loss_of(loss, margin, label) for margin in (-1.0, 0.0, 2.0)]
    assert found == pytest.approx([at_minus_one, at_zero, at_two], rel=1e-12)


@losses
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
