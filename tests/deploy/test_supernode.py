"""How often a site's SuperNode looks for messages; that it works, `test_processes.py` sees."""

from __future__ import annotations

import pytest

from umbel.deploy import supernode
from umbel.deploy.supernode import Pace


@pytest.mark.parametrize(("since", "seconds"), [(0, 0.5), (10, 0.5), (20, 1.0), (40, 2.0), (60, 3.0), (3600, 3.0)])
def test_it_looks_more_seldom_the_longer_no_message_has_come(since: float, seconds: float) -> None:
    now = [100.0]
    pace = Pace(clock=lambda: now[0])
    now[0] += since
    assert pace.seconds(3.0) == pytest.approx(seconds)


def test_a_message_makes_it_look_often_again() -> None:
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    now[0] = 3600.0
    assert pace.seconds(0.5) == 0.1, "the reply is waited for"
    assert pace.seconds(3.0) == 0.5


def test_a_server_that_is_slow_to_answer_is_asked_more_seldom() -> None:
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    waited = []
    for took in (0.1, 0.15, 9.0, 8.0):
        waited.append(pace.seconds(3.0))
        now[0] += waited[-1] + took
    assert waited == [0.5, 0.5, pytest.approx(2.0), pytest.approx(3.0)], "20 times as long as two looks took"
    assert pace.seconds(3.0) == 10.0, "but not for ever"


def test_one_slow_look_is_not_a_slow_server() -> None:
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    for took in (0.01, 5.0, 0.01, 0.01):
        seconds = pace.seconds(3.0)
        assert seconds < 1
        now[0] += seconds + took


def test_work_is_no_slow_answer() -> None:
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    pace.seconds(3.0)
    now[0] += 5.0
    pace.seconds(0.5)
    now[0] += 5.0
    assert pace.seconds(3.0) == 0.5


def test_flower_waits_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(supernode.time, "sleep", waited.append)
    monkeypatch.setattr(supernode, "run_supernode", lambda arguments, sleep: [sleep(3.0), sleep(0.5)])
    with pytest.raises(SystemExit):
        supernode.run(["--insecure"])
    assert waited == [0.5, 0.1]
