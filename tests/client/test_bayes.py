"""The posterior mean under a Gaussian prior, against the textbook's formula."""

from __future__ import annotations

import numpy as np
import pytest

from tests.client.test_predictors import made
from tests.helpers.cohorts import assert_close, cohort_of, draw_client, learner_of, linear
from tests.helpers.models import TINY_CNN, draw_hypotheses
from umbel import models
from umbel.client.cohort import LocalUpdate
from umbel.client.personal import Task, bayes, method
from umbel.models.prior import Prior
from umbel.privacy.site.policy import Personal

LINEAR = models.load("linear", loss="mse")


@pytest.fixture
def one_ratio(monkeypatch: pytest.MonkeyPatch) -> float:
    """Have noise differ from differences between clients by a ratio that is known."""
    monkeypatch.setattr(bayes, "RATIOS", np.array([0.2]))
    return 0.2


@pytest.mark.parametrize("servers", [None, Prior(np.array([[[3.0, 1.0], [1.0, 1.0]]]), np.ones(1))])
def test_of_one_hypothesis_and_ratio_it_is_the_formula(one_ratio: float, servers: Prior | None) -> None:
    """``w + S X'(X S X' + r I)^-1 (y - X w)``, S of the trace |w|^2; half of it the server's."""
    generator, centre = np.random.default_rng(1), np.array([1.0, 2.0])
    features, targets = generator.normal(size=(3, 2)), generator.normal(size=3)
    cohort, learner = cohort_of((features, targets)), learner_of("batched", LINEAR)
    own = method(Personal.BAYES)(
        Task(learner, linear(centre), cohort, LocalUpdate(1, 0.1, 0), lambda: [generator], servers)
    )
    shape = (np.outer(centre, centre) / 5 + 0.03 * np.eye(2) / 2) / 1.03
    if servers is not None:
        shape = (shape + np.array([[3.0, 1.0], [1.0, 1.0]]) / 4) / 2
    covariance = 5 * shape
    gain = covariance @ features.T @ np.linalg.inv(features @ covariance @ features.T + one_ratio * np.eye(3))
    expected = centre + gain @ (targets - features @ centre)
    np.testing.assert_allclose(own.parameters["weight"].ravel(), expected, rtol=1e-4)


def test_hypotheses_are_weighed_by_their_evidence(one_ratio: float) -> None:
    """The rows' density, a t distribution of one row's scale, in place of the sum over coordinates."""
    generator, centres = np.random.default_rng(2), np.array([[1.0, 0.0], [0.5, 1.0]])
    features, targets = generator.normal(size=(2, 2)), generator.normal(size=2)
    cohort, learner = cohort_of((features, targets)), learner_of("batched", LINEAR)
    own = made(Personal.BAYES, learner, linear(*centres), cohort)
    weights, means = [], []
    for centre in centres:
        square = centre @ centre
        covariance = (np.outer(centre, centre) + 0.03 * square * np.eye(2) / 2) / 1.03
        spread = features @ covariance @ features.T + one_ratio * np.eye(2)
        left = targets - features @ centre
        solved = np.linalg.solve(spread, left)
        weights.append(np.linalg.det(spread) ** -0.5 * ((2e-4 + left @ solved) / 2) ** (-(2 + 1) / 2))
        means.append(centre + covariance @ features.T @ solved)
    expected = np.average(means, axis=0, weights=weights)
    np.testing.assert_allclose(own.parameters["weight"].ravel(), expected, rtol=1e-4)


def test_many_rows_make_up_for_any_prior() -> None:
    generator = np.random.default_rng(3)
    features, true = generator.normal(size=(2000, 2)), np.array([-3.0, 4.0])
    targets = features @ true + 0.5 * generator.normal(size=2000)
    cohort, learner = cohort_of((features, targets)), learner_of("batched", LINEAR)
    own = made(Personal.BAYES, learner, linear([1.0, 1.0]), cohort)
    np.testing.assert_allclose(own.parameters["weight"].ravel(), true, atol=0.05)


def test_only_what_is_linear_has_the_closed_form() -> None:
    assert bayes.closed_form(LINEAR)
    assert bayes.closed_form(models.load("linear inputs=6 outputs=1", loss="mse"))
    assert not bayes.closed_form(models.load("mlp", loss="mse"))
    assert not bayes.closed_form(models.load("linear inputs=3 outputs=2", loss="cross-entropy"))
    assert not bayes.closed_form(TINY_CNN)


def test_elsewhere_parameters_are_drawn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing holds them they are those of fine-tuning, and where all does, those of the hypothesis."""
    learner, generator = learner_of("loop", TINY_CNN), np.random.default_rng(4)
    cohort, hypotheses = cohort_of(draw_client(TINY_CNN, 4, generator)), draw_hypotheses(TINY_CNN, 1)
    for strength, like in ((0.0, Personal.FINE_TUNE), (1e12, Personal.NO)):
        monkeypatch.setattr(bayes, "PROXIMAL", strength)
        # A single epoch: of several, each shuffles further.
        update = LocalUpdate(1, 0.1, 2)
        found, expected = (
            method(how)(Task(learner, hypotheses, cohort, update, lambda: [np.random.default_rng(0)]))
            for how in (Personal.BAYES, like)
        )
        assert_close(found.parameters, expected.parameters)
