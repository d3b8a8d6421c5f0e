"""The numbers of a secure sum, and how far one client can move them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from tests.helpers.errors import raises
from umbel.privacy.channels.secure.layout import Layout
from umbel.protocol.arrays import LARGEST_COVARIANCE
from umbel.protocol.errors import Refused

R = 4096.0
VECTORS = arrays(np.float64, (2, 3), elements=st.floats(-1, 1))


def part(layout: Layout, update: NDArray[np.float64], chosen: int) -> NDArray[np.float64]:
    """Return what one client adds, in clip norms: an update, clipped as a site does, its count and its moments."""
    norm = np.linalg.norm(update)
    inside = update * min(1.0, layout.inside(R) / max(norm, 1e-300))
    steps = np.trunc(inside * R).astype(np.int64)
    sums, counts = np.zeros((layout.hypotheses, layout.parameters)), np.zeros(layout.hypotheses)
    squares = np.zeros((layout.hypotheses, layout.squares))
    sums[chosen], counts[chosen] = steps, layout.count(R)
    if layout.moments:
        squares[chosen] = layout.squared(steps[None], R)[0]
    return np.concatenate([sums.ravel(), counts, squares.ravel()]) / R


def test_a_layout_has_room_for_what_is_in_it() -> None:
    """Two hypotheses of three parameters: 6 sums, 2 counts, 2 x 6 moments, 2 numbers of reports."""
    lengths = [Layout(2, 3, *what).length for what in ((), (True,), (False, True), (True, True))]
    assert lengths == [8, 20, 10, 22]
    assert Layout(1, 1000, True).length == 1000 + 1 + 1000
    assert [Layout(1, n, True).squares for n in (LARGEST_COVARIANCE, LARGEST_COVARIANCE + 1)] == [256 * 257 // 2, 257]


@given(VECTORS, st.integers(0, 1), st.integers(0, 1), st.booleans(), st.floats(0.1, 10))
def test_another_data_set_of_a_client_moves_a_sum_by_two_clip_norms_at_most(
    updates: NDArray[np.float64], one: int, other: int, moments: bool, longer: float
) -> None:
    layout = Layout(2, 3, moments)
    away = np.linalg.norm(part(layout, longer * updates[0], one) - part(layout, longer * updates[1], other))
    assert away <= 2 * (1 + 1e-12)


@pytest.mark.parametrize("moments", [False, True])
def test_two_clip_norms_are_reached(moments: bool) -> None:
    """By opposite updates, and by updates of full length from two hypotheses; so no less noise would do."""
    layout, update = Layout(2, 3, moments), np.array([1.0, 0, 0])
    for other in (part(layout, -update, 0), part(layout, update, 1)):
        assert math.isclose(np.linalg.norm(part(layout, update, 0) - other), 2, rel_tol=5e-3)


def test_moments_by_hand() -> None:
    """Of updates (100, -50) at 256 steps in a clip norm: 10000 / 256 / sqrt 2, -5000 / 256 and 2500 / 256 / sqrt 2."""
    layout = Layout(1, 2, True)
    assert layout.squared(np.array([[100, -50]]), 256.0).tolist() == [[27, -19, 6]]


@given(arrays(np.int64, (4, 3), elements=st.integers(-4000, 4000)))
def test_the_server_reads_what_clients_add(steps: NDArray[np.int64]) -> None:
    """Within rounding: each of four clients loses less than a step, which is worth R sqrt 2 here."""
    layout = Layout(1, 3, True)
    found = layout.matrices(layout.squared(steps, R).sum(axis=0, keepdims=True), R, step=0.5)
    assert np.abs(found[0] - 0.25 * steps.T @ steps).max() <= 0.25 * 4 * R * math.sqrt(2)


def test_many_parameters_have_squares_alone() -> None:
    layout, steps = Layout(1, LARGEST_COVARIANCE + 1, True), np.arange(LARGEST_COVARIANCE + 1)[None] * 40
    found = layout.matrices(layout.squared(steps, R), R, step=1.0)
    assert found.shape == (1, LARGEST_COVARIANCE + 1)
    assert np.abs(found - np.square(steps)).max() <= R * math.sqrt(2)


def test_a_grid_that_is_too_coarse_for_moments_is_refused() -> None:
    with raises(Refused, "refused.secure-terms"):
        Layout(1, 100, True).inside(256.0)
    assert Layout(1, 100).inside(1.0) == 1.0
