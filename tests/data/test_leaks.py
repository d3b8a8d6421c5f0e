"""A column that gives the target away is found by one cut of its values."""

from __future__ import annotations

import numpy as np
import pytest

from umbel.data.leaks import cut, telling

NUMBERS = np.arange(40.0)


def test_one_cut_of_ordered_values_tells_two_classes_apart() -> None:
    assert cut(NUMBERS, NUMBERS > 15, ordered=True) == 1.0
    assert cut(NUMBERS, (NUMBERS > 9) & (NUMBERS < 25), ordered=True) == pytest.approx(1), "an interval"
    # Every other number: an interval of one, of 20, is all that a cut can have of a class.
    assert cut(NUMBERS, NUMBERS % 2, ordered=True) == pytest.approx(0.525)


def test_values_without_order_are_any_that_are_few() -> None:
    names = np.array(["a", "b", "c", "d"] * 10, object)
    assert cut(names, np.isin(names, ["a", "d"]), ordered=False) == 1.0
    assert cut(np.array([*map(str, range(40))], object), NUMBERS > 15, ordered=False) == 0.0, "names of single rows"
    assert cut(NUMBERS, NUMBERS > 35, ordered=True) == 0.0, "four rows of a class say nothing"


def test_the_column_that_tells_is_named() -> None:
    noise = np.random.default_rng(0).normal(size=40)
    features, names = np.stack([noise, 3 - NUMBERS], 1), ["noise", "id"]
    assert telling(features, np.where(NUMBERS > 15, 1, -1), names) == "id"
    assert telling(features, np.where(noise > 0, 1, -1), names) == "noise"
    assert telling(features, np.random.default_rng(1).integers(2, size=40), names) == ""
    assert telling(features[:, :0], NUMBERS, []) == ""
    # More different numbers than classes can have are large or small.
    many = np.arange(1200.0)
    assert telling(many[:, None], many, ["id"]) == "id"
