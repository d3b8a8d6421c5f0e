"""What anybody can guess of preferences, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from umbel.data import Dataset, Manifest, held_out, offsets_of
from umbel.models.factors import SHRINKAGE, baselines


def dataset_of(*clients: dict[int, int], train: int) -> Dataset:
    """Return clients, each given by the label of each of its items; the first `train` of them train."""
    split = {"train": train, "validation": len(clients) - train}
    manifest = Manifest(name="films", model="factors items=9 size=2", clients=len(clients), split=split)
    features = np.concatenate([list(one) for one in clients])[:, None]
    targets = np.concatenate([list(one.values()) for one in clients])
    return Dataset(manifest, features, targets, offsets_of(map(len, clients)))


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
