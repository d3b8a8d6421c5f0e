"""The lab's methods do what every method of personalisation does, by their import paths."""

from __future__ import annotations

import pytest

import umbel
from tests.client import test_predictors
from tests.client.test_predictors import MODELS
from umbel import models
from umbel_lab.personal.memory import Remembering

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
