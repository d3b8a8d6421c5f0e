"""Where a run stands: a round is a line of JSON, and comes back from it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

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


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_none_come_back_too(odd: float) -> None:
    again = Round(**json.loads(replace(ROUND, loss=odd, nearest=[odd]).line))
    np.testing.assert_array_equal([again.loss, *again.nearest], [odd, odd])


def test_a_line_of_a_run_that_dropped_nothing_needs_not_say_so() -> None:
    entries = asdict(ROUND)
    del entries["dropped"]
    assert Round(**entries).dropped == 0


@pytest.mark.parametrize(
    ("groups", "answer"),
    [([10, 0], True), ([0, 10], True), ([10, 0, 0], True), ([9, 1], False), ([10], False), ([0, 0], False)],
)
def test_a_run_has_collapsed_where_one_hypothesis_gets_all_releases(groups: list[int], answer: bool) -> None:
    assert collapsed([a_round(t, groups=groups) for t in range(1, 7)]) == answer


@pytest.mark.parametrize(("ratio", "answer"), [([0.4, 0.1], False), ([0.6, 0.1], True), ([], True)])
def test_a_small_group_is_no_stray_where_updates_are_short(ratio: list[float], answer: bool) -> None:
    entries = [a_round(t, groups=[20, 0] if t > 2 else [19, 1], ratio=ratio) for t in range(1, 7)]
    assert collapsed(entries) == answer


def test_rounds_of_another_number_of_hypotheses_are_not_judged_together() -> None:
    assert not collapsed([a_round(t, groups=[10, 0] if t > 2 else [10, 0, 0]) for t in range(1, 7)])


def test_eq_9s_ratio_of_some_rounds_is_the_median_of_the_largest() -> None:
    assert (
        middle_ratio([a_round(1, ratio=[0.1, 0.4]), a_round(2), a_round(3, ratio=[3, 0]), a_round(4, ratio=[1, 2])])
        == 2
    )
    assert middle_ratio([a_round(1)]) is None


@pytest.mark.parametrize(
    ("losses", "answer"),
    [
        ([1.0, 0.1, 0.31], True),
        ([1.0, 0.1, 0.29], False),
        ([1.0, 1e-9, 4e-8], False),  # rounding errors of a target that a feature gives away
        ([1.0, 0.0, 1e-12], False),
        ([1.0, 0.1, math.inf], True),
        ([math.inf, 0.1, 0.31], True),
    ],
)
def test_rounds_that_led_away_are_told_from_rounding_errors(losses: list[float], answer: bool) -> None:
    assert diverged([a_round(number, loss=loss) for number, loss in enumerate(losses, 1)]) is answer


@pytest.mark.parametrize(
    ("losses", "answer"), [([0.7, 0.7, 0.7], True), ([0.7, 0.7, 0.6], False), ([0.0, 0.0], False), ([0.7], False)]
)
def test_rounds_that_change_nothing_are_told(losses: list[float], answer: bool) -> None:
    assert stuck([a_round(number, loss=loss) for number, loss in enumerate(losses, 1)]) is answer
