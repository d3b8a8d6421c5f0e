"""Where a run stands: a round is a line of JSON, and comes back from it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.history import a_round
from umbel.server.history import Round, collapsed, diverged, middle_ratio, stuck

ROUND = Round(
    number=3, loss=0.1, metric=None, asked=7, releases=6, lost_nodes=1, groups=[4, 2], nearest=[0.5, 1e-30],
    moved=True, best_round=2, median_participations=1.5, max_participations=3, seconds=0.125, dropped=2,
)  # fmt: skip


def test_a_round_comes_back_from_its_line() -> None:
    assert "\n" not in ROUND.line
    assert json.loads(ROUND.line) == asdict(ROUND)
    assert Round(**json.loads(ROUND.line)) == ROUND
    for odd in (math.inf, -math.inf, math.nan):
        again = Round(**json.loads(replace(ROUND, loss=odd, nearest=[odd]).line))
        np.testing.assert_array_equal([again.loss, *again.nearest], [odd, odd])
    entries = asdict(ROUND)
    del entries["dropped"]
    assert Round(**entries).dropped == 0, "a run that dropped nothing needs not say so"


def strayed(ratio: list[float]) -> list[Round]:
    return [a_round(t, groups=[20, 0] if t > 2 else [19, 1], ratio=ratio) for t in range(1, 7)]


@pytest.mark.parametrize(
    ("entries", "answer"),
    [
        *(([a_round(t, groups=groups) for t in range(1, 7)], True) for groups in ([10, 0], [0, 10], [10, 0, 0])),
        *(([a_round(t, groups=groups) for t in range(1, 7)], False) for groups in ([9, 1], [10], [0, 0])),
        # A small group is no stray where updates are short.
        (strayed([0.4, 0.1]), False),
        (strayed([0.6, 0.1]), True),
        (strayed([]), True),
        # Rounds of another number of hypotheses are not judged together.
        ([a_round(t, groups=[10, 0] if t > 2 else [10, 0, 0]) for t in range(1, 7)], False),
    ],
)
def test_a_run_has_collapsed_where_one_hypothesis_gets_all_releases(entries: list[Round], answer: bool) -> None:
    assert collapsed(entries) == answer


def test_eq_9s_ratio_of_some_rounds_is_the_median_of_the_largest() -> None:
    assert (
        middle_ratio([a_round(1, ratio=[0.1, 0.4]), a_round(2), a_round(3, ratio=[3, 0]), a_round(4, ratio=[1, 2])])
        == 2
    )
    assert middle_ratio([a_round(1)]) is None


@pytest.mark.parametrize(
    ("judge", "losses", "answer"),
    [
        (diverged, [1.0, 0.1, 0.31], True),
        (diverged, [1.0, 0.1, 0.29], False),
        (diverged, [1.0, 1e-9, 4e-8], False),  # rounding errors of a target that a feature gives away
        (diverged, [1.0, 0.0, 1e-12], False),
        (diverged, [1.0, 0.1, math.inf], True),
        (diverged, [math.inf, 0.1, 0.31], True),
        (stuck, [0.7, 0.7, 0.7], True),
        (stuck, [0.7, 0.7, 0.6], False),
        (stuck, [0.0, 0.0], False),
        (stuck, [0.7], False),
    ],
)
def test_rounds_that_led_away_or_changed_nothing_are_told(judge: Any, losses: list[float], answer: bool) -> None:
    assert judge([a_round(number, loss=loss) for number, loss in enumerate(losses, 1)]) is answer
