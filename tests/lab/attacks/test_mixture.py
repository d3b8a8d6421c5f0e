"""A sum is taken apart by the rows that one client moved alone, or by sums of others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel_lab.attacks.mixture import lines, parts

pytestmark = pytest.mark.rest


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_rows_of_one_client_lie_on_its_line_and_those_of_two_do_not() -> None:
    """In the plane: client (3, 4) moves three items alone, client (0, 2) two, and one item both move."""
    rows = np.array([[3, 4], [-3, -4], [6, 8], [0, 2], [0, -2], [3, 6], [0, 0]], np.float64)
    first, second = lines(rows, 2, 0.0, generator())
    np.testing.assert_allclose(np.abs(first), [0.6, 0.8], atol=1e-4)
    np.testing.assert_allclose(np.abs(second), [0, 1], atol=1e-4)


@given(st.integers(2, 6), st.integers(0, 2**32))
def test_every_client_that_moves_enough_items_alone_is_found(clients: int, seed: int) -> None:
    rng = generator(seed)
    own = rng.standard_normal((clients, 8))
    alone = np.repeat(own, 12, axis=0) * rng.choice([-1, 1], (12 * clients, 1))
    both = own[rng.integers(clients, size=40)] + rng.standard_normal((40, 8))
    found = lines(np.concatenate([alone, both]), clients, 0.0, rng)
    cosines = np.abs(found @ own.T) / np.linalg.norm(own, axis=1)
    assert (cosines.max(axis=0) > 0.98).all(), "a line within .02 of another one counts as the same"


def test_with_noise_a_single_client_is_found_as_well_as_by_the_main_direction() -> None:
    rng, own = generator(1), np.eye(8)[0]
    rows = rng.choice([-1, 1], (400, 1)) * own + 0.3 * rng.standard_normal((400, 8))
    (found,) = lines(rows, 1, 0.3, rng)
    main = np.linalg.svd(rows)[2][0]
    assert abs(found[0]) > 0.99
    assert abs(abs(found[0]) - abs(main[0])) < 0.01


def test_items_that_no_one_moved_show_no_line() -> None:
    assert lines(np.zeros((5, 3)), 2, 0.0, generator()).shape == (0, 3)


def test_the_difference_of_two_sums_is_the_update_of_who_is_in_one_of_them() -> None:
    updates = generator().standard_normal((3, 5))
    members = np.array([[True, True, True], [False, True, True]])
    np.testing.assert_allclose(parts(members, members @ updates)[0], updates[0])


@given(st.integers(2, 12), st.integers(0, 2**32))
def test_sums_over_random_halves_leave_no_update_unknown(clients: int, seed: int) -> None:
    rng = generator(seed)
    updates, members = rng.standard_normal((clients, 4)), np.zeros((64, clients), bool)
    for row in members:
        row[rng.choice(clients, clients // 2, replace=False)] = True
    np.testing.assert_allclose(parts(members, members @ updates), updates, atol=1e-9)
