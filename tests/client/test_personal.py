"""Fine-tuning and interpolation, with linear models of one weight that can be trained by hand."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tests.helpers.errors import raises
from umbel import models
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.exports import OwnNetwork
from umbel.client.learner import learner_for
from umbel.client.personal import Predictors, Task, method
from umbel.client.personal.tune import best_shares
from umbel.privacy.mechanisms.randomness import streams
from umbel.privacy.site.policy import Personal, Policy
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError, SiteError
from umbel.protocol.plugins import LAB

LEARNER = learner_for(models.load("linear", loss="mse"))
# y = 1 x and y = -1 x.
HYPOTHESES: Arrays = {"weight": np.array([[[1.0, 0.0]], [[-1.0, 0.0]]], np.float32)}
STEP = LocalUpdate(local_epochs=1, step_size=0.25, batch_size=0)


def cohort(*slopes: list[float]) -> Cohort:
    """Return clients of which each row has x = (1, 0), and y as given."""
    rows = [y for own in slopes for y in own]
    features = torch.tensor([[1.0, 0.0]] * len(rows))
    return Cohort(features, torch.tensor(rows), np.array([len(own) for own in slopes]))


def own(how: str, clients: Cohort, update: LocalUpdate = STEP) -> list[float]:
    draws = partial(streams, 0, "shuffle", 0, range(len(clients)))
    found = method(how)(Task(LEARNER, HYPOTHESES, clients, update, draws)).parameters
    assert found["weight"].shape == (len(clients), 1, 1, 2)
    assert found["weight"].dtype == np.float32
    return [float(weight) for weight in found["weight"][:, 0, 0, 0]]


def test_by_default_it_is_the_hypothesis_that_fits_best() -> None:
    assert own(Personal.NO, cohort([3.0, 3.0], [-2.0])) == [1, -1]


def test_fine_tuning_goes_on_from_there() -> None:
    """A step on the mean of (w - y)^2 goes half of the way to the mean of y at a step size of a quarter."""
    assert own(Personal.FINE_TUNE, cohort([3.0, 3.0], [-2.0])) == pytest.approx([2, -1.5])
    twice = LocalUpdate(local_epochs=2, step_size=0.25, batch_size=0)
    assert own(Personal.FINE_TUNE, cohort([3.0, 3.0], [-2.0]), twice) == pytest.approx([2.5, -1.75])


def test_the_share_is_what_suits_rows_that_were_kept_apart() -> None:
    # The fifth row is kept apart. What is trained on the others goes to 2, and the fifth asks for 1.3, or for 1, or 9.
    clients = cohort([3.0, 3, 3, 3, 1.3], [3.0, 3, 3, 3, 0.5], [3.0, 3, 3, 3, 9])
    shares = best_shares(Task(LEARNER, HYPOTHESES, clients, STEP, partial(streams, 0, "shuffle", 0, range(3))))
    np.testing.assert_allclose(shares, [0.3, 0, 1])
    # On all rows it goes half of the way to their mean, 2.66, 2.5 and 4.2, of which each takes its share.
    assert own(Personal.INTERPOLATE, clients) == pytest.approx([1 + 0.3 * 0.83, 1, 2.6])


def test_a_client_of_one_row_has_none_to_keep_apart_and_none_to_train_on() -> None:
    assert own(Personal.INTERPOLATE, cohort([3.0], [3.0, 3.0])) == pytest.approx([1, 2])


@pytest.mark.parametrize("how", [Personal.FINE_TUNE, Personal.INTERPOLATE])
def test_training_that_blows_up_leaves_the_hypothesis(how: Personal) -> None:
    blown = LocalUpdate(local_epochs=300, step_size=1e30, batch_size=0)
    assert own(how, cohort([3.0, 3, 3, 3, 3]), blown) == [1]


def doubled(task: Task) -> Predictors:
    return task.networks({name: 2 * value for name, value in task.start.items()})


def test_a_method_may_be_a_users_own() -> None:
    assert own("tests.client.test_personal:doubled", cohort([3.0, 3.0], [-2.0])) == [2, -2]


def test_a_method_that_is_none_is_named() -> None:
    with raises(ConfigError, "config.personalise", "'own'", *Personal):
        method("own")
    with raises(ConfigError, "config.personalise", "STEP", "no function"):
        method("tests.client.test_personal:STEP")
    with raises(ConfigError, "config.import", "missing"):
        method("tests.client.test_personal:missing")


@pytest.mark.parametrize("name", ["ditto", "mr-mtl", "apfl", "fedrep", "knn-per"])
def test_a_method_of_the_lab_is_named_with_its_place(name: str) -> None:
    with raises(ConfigError, "config.personalise", name, "pip install umbel-lab", LAB[name]):
        method(name)
    with raises(SiteError, "site.wrong-value", LAB[name]):
        Policy.parse({"keep-model": "/models", "personalise": name})
    assert callable(method(LAB[name]))


class Odd(Predictors):
    """A predictor of another kind."""


def test_a_network_for_other_programs_is_only_of_networks() -> None:
    """Another kind of predictor may hold the client's rows."""
    made = LEARNER.model.initial(0)
    found = Odd.plain({name: value[None, None] for name, value in made.items()}, 1)
    with raises(ConfigError, "config.rows-in-file", "Odd", "choose another method"):
        OwnNetwork(LEARNER.model, found)
