"""`umbel.sklearn`: scikit-learn's interface, checked by scikit-learn itself."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from tests.helpers.errors import raises
from umbel.protocol.errors import ConfigError
from umbel.sklearn import FederatedClassifier, FederatedRegressor

FAILS: dict[str, str] = {}
"""Checks of scikit-learn's that may fail, each with its reason; five at most."""


@pytest.mark.rest
@pytest.mark.parametrize("estimator", [FederatedRegressor, FederatedClassifier])
def test_scikit_learns_own_checks_pass(estimator: Any) -> None:
    assert len(FAILS) <= 5
    found = check_estimator(estimator(random_state=0), expected_failed_checks=FAILS, on_skip=None)
    assert {one["status"] for one in found} <= {"passed", "skipped", "xfail"}
    assert sum(one["status"] == "passed" for one in found) >= 50


def line(clients: int = 8, rows: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows on y = 3x + 2 f(client), where f is 1 for odd clients and -1 for even ones; and their clients."""
    x = np.tile(np.linspace(-1, 1, rows), clients)
    client = np.repeat(np.arange(clients), rows)
    return x[:, None], 3 * x + np.where(client % 2, 2.0, -2.0), client


@pytest.mark.rest
def test_each_row_by_itself_gives_the_line_of_least_squares() -> None:
    """Half of the rows lie 2 above y = 3x, and half 2 below."""
    X, y, _ = line()
    with pytest.warns(UserWarning, match="groups"):
        model = FederatedRegressor(random_state=0, settings={"rounds": 200, "local-epochs": 1}).fit(X, y)
    assert model.predict([[0.0], [1.0]]) == pytest.approx([0.0, 3.0], abs=0.05)
    assert not len(model.clients_)


def test_a_client_predicts_with_what_it_made_its_own_and_a_stranger_with_the_mean() -> None:
    X, y, client = line()
    names = np.array([f"ward {one}" for one in client])
    model = FederatedRegressor(random_state=0).fit(X, y, groups=names)
    found = model.predict([[0.5]] * 3, groups=["ward 3", "elsewhere", "ward 0"])
    assert found == pytest.approx([3.5, 1.5, -0.5], abs=0.2)
    assert model.predict([[0.5]]) == pytest.approx([1.5], abs=0.2)
    assert model.score(X, y, groups=names) > 0.99 > 0.6 > model.score(X, y)


def test_hypotheses_find_the_groups_without_being_made_own() -> None:
    X, y, client = line(clients=20)
    model = FederatedRegressor(hypotheses=2, personalise="no", random_state=0).fit(X, y, groups=client)
    assert model.predict([[0.0], [0.0]], groups=[1, 2]) == pytest.approx([2.0, -2.0], abs=0.1)
    assert model.predict([[0.0]]) == pytest.approx([0.0], abs=0.1), "half of the releases were of each"


def test_classes_keep_their_names() -> None:
    X, y, client = line(rows=40)
    model = FederatedClassifier(random_state=0).fit(X, np.where(y > 0, "high", "low"), groups=client)
    assert model.predict([[0.9], [0.9]], groups=[1, 0]).tolist() == ["high", "high"]
    assert model.predict([[0.0], [0.0]], groups=[1, 0]).tolist() == ["high", "low"]
    assert model.predict_proba(X).sum(axis=1) == pytest.approx(np.ones(len(X)))


@pytest.mark.rest
def test_the_same_random_state_gives_the_same_and_another_another() -> None:
    X, y, client = line()
    bounds: dict[str, Any] = {"feature_range": (-1, 1), "target_range": (-6, 6)}
    found = [
        FederatedRegressor(epsilon=50, random_state=seed, **bounds).fit(X, y, groups=client).predict(X, groups=client)
        for seed in (3, 3, 4)
    ]
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_a_grid_of_parameters_may_be_numpys() -> None:
    X, y, client = line()
    numbers, arrays = (
        FederatedRegressor(hypotheses=two, settings={"rounds": ten}, random_state=0).fit(X, y, groups=client)
        for two, ten in ((2, 10), (np.int64(2), np.int64(10)))
    )
    assert np.array_equal(arrays.predict(X), numbers.predict(X))
    assert isinstance(arrays.hypotheses, np.int64), "a parameter stays what it was given as"


@pytest.mark.rest
def test_a_guarantee_takes_public_bounds_and_is_told() -> None:
    X, y, client = line(clients=400)
    with raises(ConfigError, "config.no-range", "target_range"):
        FederatedRegressor(epsilon=4, feature_range=(-1, 1)).fit(X, y, groups=client)
    with raises(ConfigError, "config.no-range", "feature_range"):
        FederatedClassifier(epsilon=4).fit(X, y > 0, groups=client)
    with raises(ConfigError, "config.bounds", "low < high"):
        FederatedRegressor(feature_range=(1, 1)).fit(X, y)
    bounds: dict[str, Any] = {"feature_range": (-1, 1), "target_range": (-6, 6)}
    model = FederatedRegressor(epsilon=4, delta=0, random_state=0, **bounds).fit(X, y, groups=client)
    assert "pure epsilon 4" in model.guarantee_[0]
    assert model.predict([[0.5]]) == pytest.approx([1.5], abs=0.5)
    without = FederatedRegressor(random_state=0).fit(X, y, groups=client)
    assert without.guarantee_ == ["Guarantee: none, because there is no noise."]


def test_a_fit_without_groups_warns_its_caller_that_each_row_is_a_client() -> None:
    X, y, _ = line(2)
    for estimator in (FederatedRegressor, FederatedClassifier):
        with pytest.warns(UserWarning, match="groups") as caught:
            estimator(random_state=0, settings={"rounds": 1}).fit(X, y > 0)
        assert [one.filename for one in caught if "groups" in str(one.message)] == [__file__]


def test_groups_of_another_length_a_way_that_is_none_and_an_infinite_spread_are_refused() -> None:
    X, y, client = line()
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        FederatedRegressor().fit(X, y, groups=client[1:])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        FederatedRegressor().fit(X, y, groups=client).predict(X, groups=client[1:])
    with raises(ConfigError, "config.personalise"):
        FederatedRegressor(personalise="quite").fit(X, y)
    for features, targets in ((X * 1e200, y), (X, y * 1e200)):
        with raises(ConfigError, "config.bounds"):
            FederatedRegressor().fit(features, targets, groups=client)


def test_rows_without_a_group_are_no_client_and_a_client_keeps_its_type() -> None:
    X, y, client = line()
    for nobody in (np.where(client == 3, np.nan, client), np.where(client == 3, None, client.astype(str))):
        with raises(ConfigError, "config.groups", "row 18"):
            FederatedRegressor().fit(X, y, groups=nobody)
    model = FederatedRegressor(random_state=0).fit(X, y, groups=client)
    with raises(ConfigError, "config.groups"):
        model.predict(X, groups=client.astype(str))
    for alike in (float, object):
        assert np.array_equal(model.predict(X, groups=client.astype(alike)), model.predict(X, groups=client))


def test_it_leaves_no_file_behind_and_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("UMBEL_HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    X, y, client = line()
    model = FederatedRegressor(hidden=4, random_state=0).fit(X, y, groups=client)
    assert not home.exists()
    assert not [*scratch.iterdir()]
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict(X, groups=client), model.predict(X, groups=client))


@pytest.mark.rest
def test_a_pipeline_and_cross_validation_pass_groups_on() -> None:
    X, y, client = line()
    with sklearn.config_context(enable_metadata_routing=True):
        asks = clone(FederatedRegressor(random_state=0)).set_fit_request(groups=True).set_predict_request(groups=True)
        pipeline = make_pipeline(StandardScaler(), asks.set_score_request(groups=True))
        assert pipeline.fit(X, y, groups=client).score(X, y, groups=client) > 0.99
        scores = cross_val_score(pipeline, X, y, cv=GroupKFold(4), params={"groups": client})
    assert scores.max() < 0.9, "the clients of a fold are unknown to the others"
