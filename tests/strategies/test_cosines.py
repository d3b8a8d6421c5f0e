"""Directions of updates, by hand."""

from __future__ import annotations

import numpy as np

from umbel.strategies.cosines import cosines


def test_lengths_do_not_count_and_who_did_not_move_agrees_with_nobody() -> None:
    found = cosines(np.array([[2.0, 0.0], [0.0, 0.5], [-3.0, 0.0], [0.0, 0.0]]))
    np.testing.assert_allclose(found, [[1, 0, -1, 0], [0, 1, 0, 0], [-1, 0, 1, 0], [0, 0, 0, 0]])
