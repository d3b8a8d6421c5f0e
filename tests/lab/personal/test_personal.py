"""The lab's methods of personalisation, by hand: the nearest rows, and the models of four papers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import exp, log

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import umbel
from tests.client import test_predictors
from tests.client.test_personal import HYPOTHESES, LEARNER, STEP, cohort
from tests.client.test_predictors import MODELS
from tests.helpers.cohorts import CLOSE, ByArrays, all_engines, cohort_of, draw_client, learner_of
from tests.helpers.errors import raises
from tests.helpers.models import TINY_CNN, Turned, draw_hypotheses, headed
from umbel import models
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.exports import OwnNetwork
from umbel.client.learner import Learner
from umbel.client.personal import Predictors, Task, method
from umbel.models import LOSSES, METRICS, Model
from umbel.models.optimizers import SGD
from umbel.privacy.mechanisms.randomness import streams
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError, ModelError
from umbel_lab.personal import memory
from umbel_lab.personal.memory import Remembering, last_input

# --- the nearest rows


def nearest(keys: list[float], values: list[float], queries: Tensor, leave_out: bool = False) -> Tensor:
    """Return what a client's rows of one number say of others."""
    return memory.nearest(np.array(keys, np.float32)[:, None], np.array(values)[:, None], queries, leave_out)


def made(learner: Learner, hypotheses: Arrays, clients: Cohort) -> Predictors:
    draws = partial(streams, 0, "shuffle", 0, range(len(clients)))
    return method("umbel_lab.personal:knn_per")(Task(learner, hypotheses, clients, STEP, draws))


def shares(own: Predictors) -> list[float]:
    assert isinstance(own, Remembering)
    return own.shares.tolist()


def test_of_ten_rows_the_nearer_count_more() -> None:
    """Of keys 0, 1 and 3, seen from 1: at distances 1, 0 and 2. All rows far away still say something."""
    found = nearest([0.0, 1, 3], [10.0, 20, 50], torch.tensor([[1.0]]))
    weights = np.array([exp(-1), 1, exp(-2)])
    assert found.item() == pytest.approx(weights @ [10, 20, 50] / weights.sum())
    # Where exp(-d) is 0 in floating point, the ratio of two of them is not.
    found = nearest([0.0, 1], [10.0, 20], torch.tensor([[-5000.0]]))
    assert found.item() == pytest.approx((10 + 20 * exp(-1)) / (1 + exp(-1)))
    assert nearest([0.0] * 12, [*range(12)], torch.zeros(1, 1)).item() == pytest.approx(4.5), "the earlier of equals"
    # Of three rows in one place, each is left out.
    told = nearest([0.0] * 3, [1.0, 3, 11], torch.zeros(3, 1), leave_out=True)
    assert told.ravel().tolist() == pytest.approx([7, 6, 2])


def test_the_share_is_what_suits_rows_left_out() -> None:
    """The hypothesis says 1. Rows of 3 and 3 agree, and it needs no help with 1 and 1.

    Of rows 1 and 3, the first is told 3, which is worse, and the second is told 1, as by the hypothesis. A single row
    has no other.
    """
    own = made(LEARNER, HYPOTHESES, cohort([3.0, 3], [1.0, 1], [1.0, 3], [3.0]))
    assert shares(own) == pytest.approx([0.99, 0, 0, 0])
    asked = cohort([0.0], [0.0], [0.0], [0.0])
    assert own.outputs(LEARNER, asked).ravel().tolist() == pytest.approx([0.99 * 3 + 0.01, 1, 1, 1])


def test_a_share_in_between() -> None:
    """Of a hypothesis of 0 and rows (1, 0) of 1 and (2, 0) of 2, errors are 1 - 2 share and 2 - share: least at .8."""
    clients = cohort_of(([[1.0, 0.0], [2.0, 0.0]], [1.0, 2.0]))
    own = made(LEARNER, {"weight": np.zeros((1, 1, 2), np.float32)}, clients)
    assert shares(own) == pytest.approx([0.8])
    near = 1 / (1 + exp(-1))
    expected = [0.8 * (near + 2 * (1 - near)), 0.8 * (2 * near + 1 - near)]
    assert own.outputs(LEARNER, clients).ravel().tolist() == pytest.approx(expected)


def test_classes_are_mixed_as_probabilities() -> None:
    """Two rows of class 1 in one place: it has .99, and a third of .01 as the hypothesis knows nothing."""
    model = models.load("linear inputs=1 outputs=3", loss="cross-entropy")
    learner, hypotheses = learner_of("batched", model), {"1.weight": np.zeros((1, 3, 1)), "1.bias": np.zeros((1, 3))}
    clients = cohort_of(([[1.0], [1.0]], np.array([1, 1])))
    own = made(learner, {name: value.astype(np.float32) for name, value in hypotheses.items()}, clients)
    rare = 0.01 / 3
    np.testing.assert_allclose(own.outputs(learner, clients).exp(), [[rare, 0.99 + rare, rare]] * 2, rtol=1e-4)
    loss, metric = own.score(learner, clients)
    assert (loss.item(), metric.item()) == pytest.approx((-log(0.99 + rare), 1), rel=1e-4)


def test_a_score_is_the_logarithm_of_the_odds() -> None:
    """Labels 1 and -1 far apart, with two rows each; the hypothesis gives both a half."""
    learner = learner_of("batched", models.load("linear", loss="log"))
    clients = cohort_of(([[0.0, 9.0]] * 2 + [[900.0, 9.0]] * 2, [1.0, 1, -1, -1]))
    own = made(learner, {"weight": np.zeros((1, 1, 2), np.float32)}, clients)
    odds = log(0.995 / 0.005)
    assert own.outputs(learner, clients).ravel().tolist() == pytest.approx([odds, odds, -odds, -odds], rel=1e-5)


@all_engines
@pytest.mark.parametrize("model", [headed(local=""), TINY_CNN])
def test_a_representation_is_the_input_of_the_last_layer(engine: str, model: Model) -> None:
    """So the last layer makes the outputs of it."""
    learner, own = learner_of(engine, model), model.initial(1)
    clients = cohort_of(draw_client(model, 5, np.random.default_rng(0)))
    last = [name for name in own if name.endswith("weight")][-1]
    found = last_input(model, lambda: ByArrays(learner).outputs(own, clients.features)).numpy()
    outputs = found @ own[last].T + own[last.replace("weight", "bias")]
    np.testing.assert_allclose(outputs, ByArrays(learner).outputs(own, clients.features), **CLOSE)


class Raw(nn.Module):
    """A head whose parameters the network uses without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.body(rows) @ self.head.weight.T + self.head.bias


class Spread(nn.Module):
    """A mean and a variance for each target."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.head(rows)
        return outputs


@pytest.mark.parametrize("network", [Spread, Turned, Raw])
def test_a_model_whose_rows_cannot_be_remembered_is_refused(network: type[nn.Module]) -> None:
    loss = replace(LOSSES["mse"], per_sample=lambda outputs, targets: (outputs[..., 0] - targets).square())
    model = Model("odd", network, loss, METRICS["rmse"])
    with raises(ModelError, "model.no-neighbours", "'odd'", "choose another method"):
        made(learner_of("batched", model), draw_hypotheses(model, 1), cohort([1.0, 2, 3], [1.0]))


def test_a_memory_is_written_where_it_has_a_share_and_never_for_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    own = made(LEARNER, HYPOTHESES, cohort([1.0, 1], [3.0, 3]))
    assert [*own.arrays(0)] == ["weight"]
    assert {"own:keys", "own:values", "own:share"} < own.arrays(1).keys()
    assert own.arrays(1)["own:values"].tolist() == [[3.0], [3.0]]
    with raises(ConfigError, "config.rows-in-file", "choose another method"):
        OwnNetwork(LEARNER.model, own)
    # Many rows are compared a few at a time, to the same result.
    draw = np.random.default_rng(3)
    clients = cohort_of((draw.normal(size=(40, 2)), draw.normal(size=40)))
    whole = made(LEARNER, HYPOTHESES, clients).outputs(LEARNER, clients)
    monkeypatch.setattr("umbel_lab.personal.memory._AT_ONCE", 50)
    assert torch.equal(made(LEARNER, HYPOTHESES, clients).outputs(LEARNER, clients), whole)


# --- four papers, of a linear model of one weight


HALF = LocalUpdate(local_epochs=1, step_size=0.25, batch_size=0)
"""A step on the mean of (w - y)^2 goes half of the way to the mean of y."""


def weight(how: str, update: LocalUpdate) -> float:
    """Return the weight that a client whose rows say 3 makes of a weight of 1."""
    clients = cohort([3.0, 3.0])
    own = method(how)(Task(LEARNER, HYPOTHESES, clients, update, partial(streams, 0, "shuffle", 0, range(1))))
    return float(own.parameters["weight"][0, 0, 0, 0])


def test_ditto_and_mean_regularised_learning_end_where_the_pull_is_as_strong_as_the_rows() -> None:
    """2 (w - 3) + .1 (w - 1) = 0, and with the run's own pull 2 (w - 3) + 2 (w - 1) = 0."""
    long = LocalUpdate(200, 0.25, 0)
    for how in ("ditto", "mr_mtl"):
        assert weight(f"umbel_lab.personal:{how}", long) == pytest.approx(6.1 / 2.1)
    pulled = LocalUpdate(200, 0.25, 0, descent=SGD(proximal=2.0))
    assert weight("umbel_lab.personal:mr_mtl", pulled) == pytest.approx(2)


def test_adaptive_learning_moves_its_model_and_its_share() -> None:
    """w = 1, v = 1 and a half each: the mean steps from 1 to 2, v by half of that to 1.5, and the share not yet.

    Then the mean, 1.25, steps by .875: v to 1.9375, and the share by .5 times that to .9375.
    """
    assert weight("umbel_lab.personal:apfl", HALF) == pytest.approx(1.25)
    assert weight("umbel_lab.personal:apfl", LocalUpdate(2, 0.25, 0)) == pytest.approx(1 + 0.9375 * 0.9375)


def test_only_the_head_is_trained() -> None:
    model = headed(local="")
    learner, clients = learner_of("batched", model), cohort_of(draw_client(model, 4, np.random.default_rng(0)))
    hypotheses = draw_hypotheses(model, 1)
    task = Task(learner, hypotheses, clients, HALF, partial(streams, 0, "shuffle", 0, range(1)))
    own = method("umbel_lab.personal:fedrep")(task).arrays(0)
    assert own.keys() == hypotheses.keys()
    moved = {name for name, value in hypotheses.items() if not np.array_equal(own[name], value[0])}
    assert moved == {"head.weight", "head.bias"}


# --- what every method does, by their import paths


ALL = pytest.mark.parametrize(
    "how", [f"umbel_lab.personal:{name}" for name in ("ditto", "mr_mtl", "apfl", "fedrep", "knn_per")]
)


@ALL
@MODELS
def test_a_client_of_no_rows_has_a_hypothesis(how: str, model: models.Model) -> None:
    test_predictors.test_a_client_of_no_rows_has_a_hypothesis(how, model)


@ALL
@MODELS
def test_clients_do_not_depend_on_each_other(how: str, model: models.Model) -> None:
    test_predictors.test_clients_do_not_depend_on_each_other(how, model)


@ALL
def test_a_predictor_is_read_as_it_was_written(how: str) -> None:
    test_predictors.check_reading(how, Remembering)


def test_a_run_predicts_by_them(umbel_home: object) -> None:
    run = umbel.run("synthetic", rounds=1, restarts=1, clients_per_round=5)
    told = [run.predict("synthetic", [0], personalise=how)["prediction"] for how in ("umbel_lab.personal:ditto", "no")]
    assert not told[0].equals(told[1])
