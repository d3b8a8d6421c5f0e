"""How often is looked for what may come at any time."""

from __future__ import annotations

import pytest

from umbel.protocol.polling import pause


@pytest.mark.parametrize(("waited", "seconds"), [(0.0, 0.01), (0.1, 0.01), (2.0, 0.1), (10.0, 0.5), (3600.0, 0.5)])
def test_it_is_a_twentieth_of_what_was_waited_within_bounds(waited: float, seconds: float) -> None:
    assert pause(waited) == pytest.approx(seconds)
    assert pause(waited, shortest=0.0, longest=1.0) == pytest.approx(min(1.0, waited / 20))
