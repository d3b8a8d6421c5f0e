"""The numbers of a secure sum, and how far one client can move them."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from tests.helpers.errors import raises
from umbel.privacy.channels.secure.layout import Layout
from umbel.protocol.arrays import LARGEST_COVARIANCE
from umbel.protocol.errors import Refused

R = 4096.0


def test_a_layout_has_room_for_what_is_in_it() -> None:
    """Two hypotheses of three parameters: 6 sums, 2 counts, 2 x 6 moments, 2 numbers of reports."""
    lengths = [Layout(2, 3, *what).length for what in ((), (True,), (False, True), (True, True))]
    assert lengths == [8, 20, 10, 22]
    assert Layout(1, 1000, True).length == 1000 + 1 + 1000
    assert [Layout(1, n, True).squares for n in (LARGEST_COVARIANCE, LARGEST_COVARIANCE + 1)] == [256 * 257 // 2, 257]


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
