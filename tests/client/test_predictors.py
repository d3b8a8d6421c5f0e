"""Predictors of clients' own: outputs of several networks, and factors, offsets and weights by hand."""

from __future__ import annotations

from functools import partial
from math import exp, log

import numpy as np
import pytest
import torch

from tests.helpers.cohorts import CLOSE, ByArrays, cohort_of, draw_client, engines, learner_of, linear
from tests.helpers.models import TINY_CNN, draw_hypotheses
from umbel import models
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner
from umbel.client.personal import Predictors, Task, method
from umbel.models.prior import Prior
from umbel.privacy.mechanisms.randomness import streams
from umbel.privacy.site.policy import Personal
from umbel.protocol.arrays import Arrays

LINEAR = models.load("linear", loss="mse")
TWO = linear([1.0, 0.0], [-1.0, 0.0])
STEP = LocalUpdate(local_epochs=2, step_size=0.1, batch_size=2)


def made(
    how: str,
    learner: Learner,
    hypotheses: Arrays,
    cohort: Cohort,
    clients: list[int] | None = None,
    prior: Prior | None = None,
) -> Predictors:
    """Make hypotheses clients' own; `clients` are their numbers, for what shuffles their rows."""
    draws = partial(streams, 0, "shuffle", 0, clients or range(len(cohort)))
    return method(how)(Task(learner, hypotheses, cohort, STEP, draws, prior))


def rows(*targets: float) -> tuple[list[list[float]], list[float]]:
    """Return a client whose features are all (1, 0)."""
    return [[1.0, 0.0]] * len(targets), list(targets)


@engines
@pytest.mark.parametrize("model", [LINEAR, models.load("mlp", loss="mse"), TINY_CNN])
def test_outputs_are_those_of_each_clients_networks(engine: str, model: models.Model) -> None:
    """Whether each client has other networks, or all have the same."""
    learner, generator = learner_of(engine, model), np.random.default_rng(0)
    cohort = cohort_of(*(draw_client(model, count, generator) for count in (3, 1, 4)))
    drawn = draw_hypotheses(model, 6)
    own = {name: value.reshape(3, 2, *value.shape[1:]) for name, value in drawn.items()}
    same = {name: np.broadcast_to(value[:1], value.shape) for name, value in own.items()}
    for networks in (own, same):
        found = learner.outputs(networks, cohort)
        assert len(found) == 2
        for c in range(3):
            one = cohort.part(slice(c, c + 1)).features
            place = slice(int(cohort.starts[c]), int(cohort.starts[c] + cohort.lengths[c]))
            for j in range(2):
                expected = ByArrays(learner).outputs({name: value[c, j] for name, value in networks.items()}, one)
                np.testing.assert_allclose(found[j, place], expected, **CLOSE)


class Flat(torch.nn.Linear):
    """Reshapes its rows, which PyTorch cannot do with none."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows.reshape(len(rows), -1))


@pytest.mark.parametrize("counts", [(1,), (1, 2)])
def test_a_network_that_takes_no_empty_batch_is_made_a_clients_own(counts: tuple[int, ...]) -> None:
    """Of a client with one row, cross-validation leaves no row to train on."""
    model = models.Model("flat", lambda: Flat(2, 1), models.LOSSES["mse"], models.METRICS["rmse"])
    cohort = cohort_of(*(rows(*range(count)) for count in counts))
    learner = learner_of("loop", model)
    own = made(Personal.AUTO, learner, draw_hypotheses(model, 2), cohort)
    assert torch.isfinite(own.outputs(learner, cohort)).all()


@engines
def test_outputs_do_not_depend_on_how_a_cohort_is_cut(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, generator = learner_of(engine, LINEAR), np.random.default_rng(0)
    cohort = cohort_of(*(draw_client(LINEAR, count, generator) for count in (3, 1, 4, 2)))
    own = made(Personal.FINE_TUNE, learner, TWO, cohort)
    whole = own.outputs(learner, cohort)
    monkeypatch.setattr(type(learner), "_chunk_bytes", lambda self: 1)
    np.testing.assert_allclose(own.outputs(learner, cohort), whole, **CLOSE)


def test_a_factor_and_an_offset_by_hand() -> None:
    """Predictions are 1, and targets 2 and 3: (2 + .1) f + 2 o = 5 + .1 and 2 f + (2 + 2) o = 5."""
    learner, cohort = learner_of("batched", LINEAR), cohort_of(rows(2.0, 3.0))
    own = made(Personal.CALIBRATE, learner, linear([1.0, 0.0]), cohort)
    factor, offset = np.linalg.solve([[2.1, 2.0], [2.0, 4.0]], [5.1, 5.0])
    assert (own.factor.item(), own.offset.item()) == pytest.approx((factor, offset))
    np.testing.assert_allclose(own.outputs(learner, cohort), np.full((2, 1), factor + offset), rtol=1e-6)
    loss, metric = own.score(learner, cohort)
    assert loss == metric == pytest.approx(np.sqrt(((2 - factor - offset) ** 2 + (3 - factor - offset) ** 2) / 2))


def test_weights_by_hand() -> None:
    """The hypotheses say 1 and -1, the rows 1 and 2: squares of 1 and of 13, with .1 for the row that is assumed."""
    learner, cohort = learner_of("batched", LINEAR), cohort_of(rows(1.0, 2.0))
    own = made(Personal.MIXTURE, learner, TWO, cohort)
    first, second = 1.1 ** -(3 / 2), 13.1 ** -(3 / 2)
    weight = first / (first + second)
    np.testing.assert_allclose(own.weights, [[weight, 1 - weight]])
    mean = 2 * weight - 1
    factor, offset = np.linalg.solve([[2 * mean**2 + 0.1, 2 * mean], [2 * mean, 2 + 2]], [3 * mean + 0.1, 3])
    assert (own.factor.item(), own.offset.item()) == pytest.approx((factor, offset))
    np.testing.assert_allclose(own.outputs(learner, cohort), np.full((2, 1), factor * mean + offset), rtol=1e-6)


def test_classes_that_a_client_has_more_often_are_more_likely() -> None:
    """Two rows of the first class and none of the two others, of which ten rows each are assumed."""
    model = models.load("linear inputs=2 outputs=3", loss="cross-entropy")
    learner = learner_of("batched", model)
    cohort = cohort_of(([[1.0, 0.0]] * 2, np.array([0, 0])))
    hypotheses = draw_hypotheses(model, 1)
    own = made(Personal.CALIBRATE, learner, hypotheses, cohort)
    np.testing.assert_allclose(own.offset, [[log(36 / 32), log(30 / 32), log(30 / 32)]])
    np.testing.assert_array_equal(own.factor, np.ones((1, 3)))


def test_classifiers_are_mixed_as_probabilities() -> None:
    model = models.load("linear inputs=1 outputs=2", loss="cross-entropy")
    learner, cohort = learner_of("batched", model), cohort_of(([[1.0]], np.array([0])))
    # Logits of (1, 0) and (0, 0): probabilities of the first class e/(e + 1) and 1/2, which are the weights too.
    biases = np.array([[1.0, 0.0], [0.0, 0.0]], np.float32)
    hypotheses: Arrays = {"1.weight": np.zeros((2, 2, 1), np.float32), "1.bias": biases}
    own = made(Personal.MIXTURE, learner, hypotheses, cohort)
    sure = exp(1) / (exp(1) + 1)
    weight = sure / (sure + 0.5)
    np.testing.assert_allclose(own.weights, [[weight, 1 - weight]], rtol=1e-6)
    mean = weight * sure + (1 - weight) / 2
    plain = Predictors.plain(own.parameters, 2, own.weights).outputs(learner, cohort)
    np.testing.assert_allclose(plain.exp(), [[mean, 1 - mean]], rtol=1e-5)


ALL = pytest.mark.parametrize("how", list(Personal))
MODELS = pytest.mark.parametrize("model", [LINEAR, models.load("mlp", loss="mse"), TINY_CNN])


def some_clients(model: models.Model, *lengths: int) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(5)
    return [draw_client(model, length, generator) for length in lengths]


@ALL
@MODELS
def test_a_client_of_no_rows_has_a_hypothesis(how: str, model: models.Model) -> None:
    """Of one it is that one; the others fare as they would without it."""
    learner = learner_of("loop", model)
    first, second = some_clients(model, 3, 2)
    cohort = cohort_of(first, (first[0][:0], first[1][:0]), second)
    hypotheses = draw_hypotheses(model, 1)
    own = made(how, learner, hypotheses, cohort)
    asked = cohort_of(second)
    found = own.part(slice(1, 2)).outputs(learner, asked)
    expected = ByArrays(learner).outputs({name: value[0] for name, value in hypotheses.items()}, asked.features)
    np.testing.assert_allclose(found, expected, **CLOSE)
    others = made(how, learner, hypotheses, cohort_of(first, second), [0, 2])
    np.testing.assert_allclose(
        own.part(slice(2, 3)).outputs(learner, asked), others.part(slice(1, 2)).outputs(learner, asked), **CLOSE
    )


@ALL
@MODELS
def test_clients_do_not_depend_on_each_other(how: str, model: models.Model) -> None:
    """In another order, and one by one, each has the same predictor."""
    learner, hypotheses = learner_of("batched", model), draw_hypotheses(model, 2)
    clients = some_clients(model, 4, 1, 7)
    asked = cohort_of(*clients)
    together = made(how, learner, hypotheses, asked).outputs(learner, asked)
    order = [2, 0, 1]
    turned = cohort_of(*(clients[c] for c in order))
    found = made(how, learner, hypotheses, turned, order).outputs(learner, turned)
    np.testing.assert_allclose(found, torch.cat([together[5:], together[:5]]), rtol=1e-4, atol=1e-5)
    alone = [made(how, learner, hypotheses, one := cohort_of(clients[c]), [c]).outputs(learner, one) for c in range(3)]
    np.testing.assert_allclose(torch.cat(alone), together, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 20])
def test_a_factor_and_an_offset_are_bounded(count: int) -> None:
    """They fit no worse than 1 and 0, so what holds them there bounds them by the residuals."""
    generator = np.random.default_rng(count)
    learner = learner_of("batched", LINEAR)
    for _ in range(20):
        scale = 10 ** generator.uniform(-3, 3)
        features, targets = generator.normal(size=(count, 2)), scale * generator.normal(size=count)
        own = made(Personal.CALIBRATE, learner, linear([1.0, 0.0]), cohort_of((features, targets)))
        residual = np.linalg.norm(targets.astype(np.float32) - features[:, 0].astype(np.float32))
        assert abs(own.factor.item() - 1) <= residual / np.sqrt(0.1) * (1 + 1e-6)
        assert abs(own.offset.item()) <= residual / np.sqrt(2) * (1 + 1e-6)


@ALL
def test_a_predictor_is_read_as_it_was_written(how: Personal) -> None:
    check_reading(how, Predictors)


def check_reading(how: str, kind: type[Predictors]) -> None:
    """Check that predictors of a kind give the same outputs after they were written and read."""
    learner, cohort = learner_of("batched", LINEAR), cohort_of(rows(2.0, 3.0, 1.0), rows(-1.0))
    own = made(how, learner, TWO, cohort)
    for c in range(2):
        one = cohort.part(slice(c, c + 1))
        read = kind.read(own.arrays(c))
        assert torch.equal(read.outputs(learner, one), own.part(slice(c, c + 1)).outputs(learner, one))
