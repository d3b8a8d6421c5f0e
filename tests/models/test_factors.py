"""The factor model: items that are learnt together, and a vector that each user keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from tests.helpers.errors import raises
from umbel import models
from umbel.client.cohort import Cohort
from umbel.data import Dataset, Manifest, held_out, offsets_of
from umbel.models import LOSSES
from umbel.models.factors import INITIAL_SCALE, SHRINKAGE, SLOPES, BiasedFactors, Factors, rules
from umbel.protocol.errors import ModelError
from umbel.protocol.run_config import RunConfig

FALSE_ALARM = 1e-6

losses = pytest.mark.parametrize("loss", list(SLOPES))


# --- the network


def test_the_score_of_an_item_is_its_product_with_the_users_vector() -> None:
    factors = Factors(3, 2)
    items = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    factors.load_state_dict({"items": items, "user": torch.tensor([10.0, 1.0])})
    assert factors(torch.tensor([[2.0], [0.0], [2.0]])).tolist() == [[45], [1], [45]]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_a_factor_model_is_one_of_the_margin(loss: str) -> None:
    if loss in SLOPES:
        assert models.load("factors items=3 size=2", loss).loss is LOSSES[loss]
    else:
        with raises(ModelError, "model.loss", repr(loss), "log, hinge, margin"):
            models.load("factors items=3 size=2", loss)


def test_a_fresh_users_vector_is_of_unit_norm_on_average() -> None:
    """N(0, I/d): d |u|^2 ~ chi^2(d). False-alarm rate 1e-6."""
    generators = [np.random.default_rng([3, c]) for c in range(2000)]
    users = models.load("factors items=4 size=8").initial_local(generators)["user"]
    assert (users.shape, users.dtype) == ((2000, 8), np.float32)
    assert stats.kstest(8 * (users**2).sum(axis=1), stats.chi2(8).cdf).pvalue > FALSE_ALARM


# --- a newcomer's vector


def fitted(
    items: Any, rows: Any, labels: Any, lengths: Any, loss: str = "log", kind: type[Factors | BiasedFactors] = Factors
) -> NDArray[Any]:
    features = np.asarray(rows, np.float32).reshape(-1, 1)
    stacked = {"items": np.asarray(items, np.float32)}
    return kind.fit_local(stacked, features, np.asarray(labels), np.asarray(lengths), loss)["user"]


@losses
def test_a_newcomer_is_on_the_side_of_what_it_likes(loss: str) -> None:
    (user,) = fitted([[1, 0], [-1, 0]], [0, 1], [1, -1], [2], loss)
    assert user[0] > 1
    assert user[1] == 0


def test_a_newcomers_vector_is_where_nothing_pulls_any_more() -> None:
    """The gradient of the mean log loss and its little decay, 1e-3 u, is gone."""
    generator = np.random.default_rng(5)
    items, labels = generator.standard_normal((6, 2)), np.array([1, -1, 1, 1, -1, -1])
    (user,) = fitted(items, range(6), labels, [6]).astype(float)
    slopes = -labels / (1 + np.exp(labels * (items @ user)))
    assert np.abs(slopes @ items / 6 + 1e-3 * user).max() < 1e-4


def test_who_has_no_rows_stays_at_nothing() -> None:
    users = fitted([[1, 0], [-1, 0]], [0, 1], [1, -1], [0, 2, 0])
    assert not users[[0, 2]].any()
    assert users[1].any()
    assert not fitted([[1, 0]], [], [], [0]).any()


def test_newcomers_are_fitted_as_if_alone() -> None:
    generator = np.random.default_rng(0)
    items, rows = generator.standard_normal((9, 3)), generator.integers(0, 9, 7)
    labels = generator.choice([-1, 1], 7)
    together = fitted(items, rows, labels, [4, 1, 2])
    parts = slice(0, 4), slice(4, 5), slice(5, 7)
    alone = [fitted(items, rows[part], labels[part], [len(rows[part])])[0] for part in parts]
    np.testing.assert_allclose(together, alone, rtol=1e-6)


# --- biases


def test_a_score_with_biases_adds_the_items_and_the_users() -> None:
    factors = BiasedFactors(2, 2)
    items = torch.tensor([[0.0, 1.0, 0.5], [2.0, 3.0, -4.0]])
    factors.load_state_dict({"items": items, "user": torch.tensor([10.0, 1.0, 100.0])})
    assert factors(torch.tensor([[1.0], [0.0]])).tolist() == [[20 + 3 - 4 + 100], [1 + 0.5 + 100]]


def test_everybody_starts_as_the_average_user_and_items_without_a_bias() -> None:
    model = models.load("biased-factors items=500 size=8")
    assert (model.shapes, model.local_shapes) == ({"items": (500, 9)}, {"user": (9,)})
    items = model.initial(5)["items"]
    assert not items[:, -1].any()
    assert stats.kstest(items[:, :-1].ravel(), stats.norm(scale=INITIAL_SCALE).cdf).pvalue > FALSE_ALARM
    assert not model.initial_local([np.random.default_rng(0)])["user"].any()


@pytest.mark.parametrize("loss", ["log", "margin"])  # the slope of the hinge jumps
def test_a_newcomer_with_a_bias_is_where_nothing_pulls_any_more(loss: str) -> None:
    """The gradient of the loss summed over its rows, and that of the priors, is gone."""
    generator = np.random.default_rng(5)
    items, labels = generator.standard_normal((6, 3)), np.array([1, -1, 1, 1, -1, 1])
    user = fitted(items, range(6), labels, [6], loss, BiasedFactors)[0].astype(float)
    own = np.column_stack([items[:, :2], np.ones(6)])
    slopes = SLOPES[loss](labels * (own @ user + items[:, 2])) * labels
    assert np.abs(slopes @ own + [5, 5, 1] * user).max() < 1e-3


def test_a_newcomer_of_few_rows_stays_near_the_average_user() -> None:
    few, many = (
        fitted(np.zeros((50, 3)), range(rows), np.ones(rows), [rows], kind=BiasedFactors)[0] for rows in (1, 50)
    )
    assert 0 < few[-1] < 0.5 < 2 < many[-1]
    assert not few[:-1].any()


def test_biased_factors_take_the_size_of_the_datasets() -> None:
    manifest = Manifest(name="films", model="factors items=7 size=3", clients=2, split={"train": 1, "validation": 1})
    for words, size in (("", " items=7 size=3"), (" items=7 size=2", " items=7 size=2")):
        model = models.load_for(RunConfig(model=f"biased-factors{words}"), manifest)
        assert model.name == f"biased-factors{size}"
    for other in (None, manifest.model_copy(update={"model": "linear"})):
        with raises(ModelError, "model.size", "biased-factors"):
            models.load_for(RunConfig(model="biased-factors"), other)


# --- baselines, by hand


def dataset_of(*clients: dict[int, int], train: int) -> Dataset:
    split = {"train": train, "validation": len(clients) - train}
    manifest = Manifest(name="films", model="factors items=9 size=2", clients=len(clients), split=split)
    features = np.concatenate([list(one) for one in clients])[:, None]
    targets = np.concatenate([list(one.values()) for one in clients])
    return Dataset(manifest, features, targets, offsets_of(map(len, clients)))


def baselines(dataset: Dataset) -> dict[str, float]:
    """Return the means of the rules over validation clients, each of which holds out every fifth row."""
    cohort = Cohort.gather(dataset, range(dataset.manifest.clients), torch.device("cpu"))
    train, rest = (
        cohort.part(some) for some in (slice(0, dataset.manifest.train), slice(dataset.manifest.train, None))
    )
    parts = [(one.features.numpy(), one.targets.numpy(), one.lengths) for one in (train, *rest.split())]
    return {name: float(values.mean()) for name, values in rules(*parts).items()}


def test_every_fifth_row_is_held_out_and_of_fewer_the_last() -> None:
    kept = held_out(np.array([3, 5, 11, 1]))
    assert np.split(np.flatnonzero(kept), 1)[0].tolist() == [2, 7, 12, 17, 19]


def test_each_rule_is_right_as_often_as_by_hand() -> None:
    """Two validation users are scored on one row each, items 4 and 2, the first of which is liked."""
    trains = [{0: 1, 2: 1, 4: 1}, {0: 1, 2: 1, 4: -1}, {2: 1, 4: -1}]
    likes_little, likes_much = {0: -1, 1: -1, 2: -1, 3: 1, 4: 1}, {0: 1, 1: 1, 2: -1}
    found = baselines(dataset_of(*trains, likes_little, likes_much, train=3))
    assert found["all liked"] == 0.5
    assert found["user's majority"] == 0.0, "one of four for item 4, two of two for item 2"
    assert found["item's majority"] == 0.0, "one of three for item 4, three of three for item 2"
    assert found["item and user bias"] == 0.0


def test_a_bias_of_the_user_outweighs_an_item_that_few_know() -> None:
    """Mean .5; item 0 is 1 of 1: bias .5 / 6. A user without a like among eight: - 4 / 13 and a little."""
    train = {0: 1, 1: -1}
    validates = {item: -1 for item in (2, 3, 4, 5, 0, 6, 7, 8)} | {9: -1}
    found = baselines(dataset_of(train, validates, train=1))
    assert SHRINKAGE == 5
    assert found["item's majority"] == 0.0
    assert found["item and user bias"] == 1.0
    assert found["all liked"] == 0.0


def test_a_user_of_one_row_is_guessed_by_the_average() -> None:
    found = baselines(dataset_of({0: 1, 1: 1}, {2: 1}, train=1))
    assert found == pytest.approx(dict.fromkeys(found, 1.0))
