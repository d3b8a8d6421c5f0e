"""k-means on a random tenth of the columns gives the same labels, unless noise drowns the kinds."""

from __future__ import annotations

import pytest

from benchmarks.sketch import sketch

pytestmark = pytest.mark.rest


def test_kinds_that_are_well_apart_are_told_from_a_tenth_of_the_columns() -> None:
    assert sketch(1.0, n=30_000, draws=1) == (1.0, 1.0, 1.0)


def test_kinds_that_are_close_are_told_from_all_columns_alone() -> None:
    same, right, of_tenth = sketch(0.1, draws=1)
    assert right == 1.0
    assert 0.8 < of_tenth == same < 1.0
