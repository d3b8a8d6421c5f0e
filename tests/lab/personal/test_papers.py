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
