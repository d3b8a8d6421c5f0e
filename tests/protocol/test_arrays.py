"""Named arrays become one matrix and come back, whatever their shapes; what is not finite is found."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.helpers.records import STACKED, assert_same_arrays, stacked
from umbel.protocol.arrays import Arrays, all_finite, flatten, unflatten


def test_flat_rows_hold_the_arrays_one_after_the_other() -> None:
    flat = flatten(STACKED)
    assert flat.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert flat.dtype == np.float64


@given(stacked(smallest=0))
def test_unflatten_undoes_flatten(arrays: Arrays) -> None:
    assert_same_arrays(unflatten(flatten(arrays), arrays), arrays)


@given(stacked(), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_flatten_undoes_unflatten_whatever_the_number_of_rows(like: Arrays, more: int, seed: int) -> None:
    n = flatten(like).shape[1]
    matrix = np.random.default_rng(seed).standard_normal((1 + more, n)).astype(np.float32)
    np.testing.assert_array_equal(flatten(unflatten(matrix, like)), matrix)


@given(hnp.arrays(np.float32, (3, 4), elements=st.floats(width=32)))
def test_rows_are_finite_if_all_their_numbers_are(values: np.ndarray) -> None:
    assert all_finite(values, axis=1).tolist() == np.isfinite(values).all(axis=1).tolist()
    assert bool(all_finite(values)) == bool(np.isfinite(values).all())


def test_the_largest_numbers_are_finite_together_and_infinities_that_cancel_are_not() -> None:
    for sign in (1, -1):
        assert all_finite(np.full(10_000, sign * np.finfo(np.float32).max))
    assert not all_finite(np.array([np.inf, -np.inf], np.float32))
