"""How often is looked for what may come at any time."""

from __future__ import annotations

import pytest

from umbel.protocol.polling import Pace, pause


@pytest.mark.parametrize(("waited", "seconds"), [(0.0, 0.01), (0.1, 0.01), (2.0, 0.1), (10.0, 0.5), (3600.0, 0.5)])
def test_it_is_a_twentieth_of_what_was_waited_within_bounds(waited: float, seconds: float) -> None:
    assert pause(waited) == pytest.approx(seconds)
    assert pause(waited, shortest=0.0, longest=1.0) == pytest.approx(min(1.0, waited / 20))


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def pace(now: list[float]) -> Pace:
    return Pace(clock=lambda: now[0])


@pytest.mark.parametrize(("since", "seconds"), [(0, 0.5), (10, 0.5), (20, 1.0), (40, 2.0), (60, 3.0), (3600, 3.0)])
def test_without_messages_it_looks_more_seldom(now: list[float], pace: Pace, since: float, seconds: float) -> None:
    now[0] += since
    assert pace.seconds(3.0) == pytest.approx(seconds)
    assert pace.seconds(0.5) == 0.1, "the reply is waited for"
    now[0] += 5.0
    assert pace.seconds(3.0) == 0.5, "a message makes it look often again, and work is no slow answer"


def test_a_server_that_is_slow_to_answer_is_asked_more_seldom(now: list[float], pace: Pace) -> None:
    waited = []
    for took in (0.1, 0.15, 9.0, 8.0):
        waited.append(pace.seconds(3.0))
        now[0] += waited[-1] + took
    assert waited == [0.5, 0.5, pytest.approx(2.0), pytest.approx(3.0)], "20 times as long as two looks took"
    assert pace.seconds(3.0) == 10.0, "but not for ever"
    once = Pace(clock=lambda: now[0])
    for took in (0.01, 5.0, 0.01, 0.01):
        seconds = once.seconds(3.0)
        assert seconds < 1, "one slow look is not a slow server"
        now[0] += seconds + took
