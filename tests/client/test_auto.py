"""The method that suits a client's rows is found by leaving rows out, and public preferences settle the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.client.test_predictors import made, rows
from tests.helpers.cohorts import Rows, assert_close, cohort_of, draw_client, learner_of, linear
from tests.helpers.models import TINY_CNN, draw_hypotheses
from umbel import models
from umbel.client.personal import auto
from umbel.client.personal.auto import folded
from umbel.models.prior import Prior
from umbel.privacy.site.policy import Personal

LINEAR = models.load("linear", loss="mse")
LEARNER = learner_of("batched", LINEAR)
ONE = linear([1.0, 0.5])


def client(theta: list[float], count: int, noise: float = 0.0, seed: int = 0) -> Rows:
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(count, 2)).astype(np.float32)
    return features, features @ np.array(theta, np.float32) + noise * generator.normal(size=count).astype(np.float32)


def test_each_row_is_left_out_once() -> None:
    """Of three rows and of seven, in five parts."""
    cohort = cohort_of(rows(0.0, 1.0, 2.0), rows(*map(float, range(10, 17))))
    left = [folded(cohort, fold)[1] for fold in range(5)]
    assert [part.targets.tolist() for part in left] == [[0, 10, 15], [1, 11, 16], [2, 12], [13], [14]]
    assert [part.lengths.tolist() for part in left] == [[1, 2], [1, 2], [1, 1], [0, 1], [0, 1]]
    for fold in range(5):
        seen, left_out = folded(cohort, fold)
        assert sorted(torch.cat([seen.targets, left_out.targets]).tolist()) == sorted(cohort.targets.tolist())


@pytest.mark.parametrize(
    ("theta", "noise", "how"),
    [
        ([2.0, 1.0], 0.1, Personal.CALIBRATE),  # twice the hypothesis
        ([-1.0, 3.0], 0.01, Personal.BAYES),  # nothing like it
    ],
)
def test_a_client_gets_what_suits_it(theta: list[float], noise: float, how: Personal) -> None:
    cohort = cohort_of(client(theta, 30, noise))
    found, expected = made(Personal.AUTO, LEARNER, ONE, cohort), made(how, LEARNER, ONE, cohort)
    fresh = cohort_of(client(theta, 200, seed=1))
    plain = made(Personal.NO, LEARNER, ONE, cohort)
    ours, theirs, before = (own.score(LEARNER, fresh)[0] for own in (found, expected, plain))
    assert ours <= 1.2 * theirs
    assert ours < 0.2 * before


def test_of_two_hypotheses_that_fit_a_client_alike_it_takes_both() -> None:
    """Its rows lie between them, and a factor makes neither fit: the rows of each feature need another."""
    features = np.array([[1, 0], [0, 1]] * 6, np.float32)
    cohort = cohort_of((features, np.tile([0.5, 0.5], 6).astype(np.float32)))
    two = linear([1.0, 0.0], [0.0, 1.0])
    own = made(Personal.AUTO, LEARNER, two, cohort)
    assert own.score(LEARNER, cohort)[0] < 0.1


@pytest.mark.parametrize("model", [LINEAR, TINY_CNN])
def test_it_is_the_same_however_many_are_computed_at_once(model: models.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, generator = learner_of("loop", model), np.random.default_rng(0)
    clients = cohort_of(*(draw_client(model, count, generator) for count in (4, 1, 7, 2, 6)))
    hypotheses = draw_hypotheses(model, 2)
    together = made(Personal.AUTO, learner, hypotheses, clients)
    monkeypatch.setattr(auto, "_AT_ONCE", 2 * model.num_parameters)
    some = made(Personal.AUTO, learner, hypotheses, clients)
    for client_ in range(5):
        assert_close(some.arrays(client_), together.arrays(client_), rtol=1e-4)


def test_a_prior_matters_only_where_the_posterior_has_a_closed_form() -> None:
    """Proximal steps serve clients of few rows badly, and one row cannot tell that."""
    model = models.load("mlp", loss="mse")
    learner, hypotheses, n = learner_of("batched", model), draw_hypotheses(model, 1), model.num_parameters
    prior = Prior(np.full((1, n), 1 / n), np.ones(1))
    cohort = cohort_of(*(draw_client(model, count, np.random.default_rng(count)) for count in (1, 2, 9)))
    with_prior, without = (made(Personal.AUTO, learner, hypotheses, cohort, prior=one) for one in (prior, None))
    for client_ in range(3):
        assert_close(with_prior.arrays(client_), without.arrays(client_), rtol=0, atol=0)


def test_a_client_of_one_row_takes_what_is_preferred() -> None:
    """Under squares that is the mixture, and for classes the hypothesis as it is."""
    cohort = cohort_of(rows(3.0))
    two = linear([1.0, 0.0], [-1.0, 0.0])
    auto, expected = (made(how, LEARNER, two, cohort).arrays(0) for how in (Personal.AUTO, Personal.MIXTURE))
    assert_close(auto, expected, rtol=0, atol=0)
    learner, hypotheses = learner_of("loop", TINY_CNN), draw_hypotheses(TINY_CNN, 2)
    cohort = cohort_of(draw_client(TINY_CNN, 1, np.random.default_rng(0)))
    auto, expected = (made(how, learner, hypotheses, cohort).arrays(0) for how in (Personal.AUTO, Personal.NO))
    assert_close(auto, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("count", "most"), [(1, 1.8), (2, 1.5), (4, 1.3), (20, 1.1)])
def test_what_clients_of_few_rows_may_lose(count: int, most: float) -> None:
    """200 clients who differ in nothing, whose noise is .3: the hypothesis is the best that there is."""
    clients = cohort_of(*(client([1.0, 0.5], count, 0.3, seed) for seed in range(200)))
    fresh = cohort_of(*(client([1.0, 0.5], 20, 0.3, seed + 1000) for seed in range(200)))

    def mean(how: Personal) -> float:
        return float(made(how, LEARNER, ONE, clients).score(LEARNER, fresh)[0].mean())

    assert mean(Personal.AUTO) < most * mean(Personal.NO)
