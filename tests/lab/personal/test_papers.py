"""Personal models of four papers, of a linear model of one weight that can be trained by hand."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.client.test_personal import HYPOTHESES, LEARNER, cohort
from tests.helpers.cohorts import cohort_of, draw_client, learner_of
from tests.helpers.models import draw_hypotheses, headed
from umbel.client.cohort import LocalUpdate
from umbel.client.personal import Task, method
from umbel.models.optimizers import SGD
from umbel.privacy.mechanisms.randomness import streams

HALF = LocalUpdate(local_epochs=1, step_size=0.25, batch_size=0)
"""A step on the mean of (w - y)^2 goes half of the way to the mean of y."""


def weight(how: str, update: LocalUpdate) -> float:
    """Return the weight that a client whose rows say 3 makes of a weight of 1."""
    clients = cohort([3.0, 3.0])
    own = method(how)(Task(LEARNER, HYPOTHESES, clients, update, partial(streams, 0, "shuffle", 0, range(1))))
    return float(own.parameters["weight"][0, 0, 0, 0])


def test_ditto_ends_where_the_pull_of_the_hypothesis_is_as_strong_as_the_rows() -> None:
    """2 (w - 3) + .1 (w - 1) = 0."""
    long = LocalUpdate(local_epochs=200, step_size=0.25, batch_size=0)
    assert weight("umbel_lab.personal:ditto", long) == pytest.approx(6.1 / 2.1)


def test_mean_regularised_learning_has_the_runs_own_pull() -> None:
    """2 (w - 3) + 2 (w - 1) = 0."""
    long = LocalUpdate(200, 0.25, 0, descent=SGD(proximal=2.0))
    assert weight("umbel_lab.personal:mr_mtl", long) == pytest.approx(2)
    assert weight("umbel_lab.personal:mr_mtl", LocalUpdate(200, 0.25, 0)) == weight(
        "umbel_lab.personal:ditto", LocalUpdate(200, 0.25, 0)
    )


def test_adaptive_learning_moves_its_model_and_its_share() -> None:
    """w = 1, v = 1 and a half each: the mean steps from 1 to 2, v by half of that to 1.5, and the share not yet.

    Then the mean, 1.25, steps by .875: v to 1.9375, and the share by .5 times that to .9375.
    """
    assert weight("umbel_lab.personal:apfl", HALF) == pytest.approx(1.25)
    assert weight("umbel_lab.personal:apfl", LocalUpdate(2, 0.25, 0)) == pytest.approx(1 + 0.9375 * 0.9375)


def test_only_the_head_is_trained() -> None:
    learner, clients = (
        learner_of("batched", headed(local="")),
        cohort_of(draw_client(headed(local=""), 4, np.random.default_rng(0))),
    )
    hypotheses = draw_hypotheses(headed(local=""), 1)
    own = method("umbel_lab.personal:fedrep")(
        Task(learner, hypotheses, clients, HALF, partial(streams, 0, "shuffle", 0, range(1)))
    ).arrays(0)
    assert own.keys() == hypotheses.keys()
    moved = {name for name, value in hypotheses.items() if not np.array_equal(own[name], value[0])}
    assert moved == {"head.weight", "head.bias"}
