"""The medians of rounds stand beside each other."""

from __future__ import annotations

import pytest

from benchmarks import flower
from benchmarks.measure import console

pytestmark = pytest.mark.rest


def test_medians_and_spread_are_shown() -> None:
    with console.capture() as printed:
        flower.show([0.08, 0.1, 0.104], 2, alone=0.0029, startup=12.3)
    for text in ("2 nodes, 3 rounds", "100", "80 to 104", "2.9", "took 12.3 s"):
        assert text in printed.get()
