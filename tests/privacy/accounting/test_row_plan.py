"""The noise in training that a guarantee for rows needs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.errors import raises
from umbel.privacy.accounting.plan import RowTask, row_plan, row_plan_for
from umbel.privacy.accounting.rows import row_guarantee
from umbel.privacy.mechanisms.gaussian import calibrate
from umbel.protocol.errors import ConfigError

TASK = RowTask(rows=500, rate=0.1, steps=10, participations=20)


@pytest.mark.parametrize("target", [0.5, 3.0, 12.0])
def test_the_noise_reaches_the_target_and_less_does_not(target: float) -> None:
    planned = row_plan_for(TASK, target)
    assert planned.guarantee.epsilon <= target
    assert row_plan(TASK, planned.noise_multiplier * 0.998).guarantee.epsilon > target
    assert planned.guarantee == row_guarantee({TASK.release(planned.noise_multiplier): 20})


def test_without_sampling_it_is_the_analytic_calibration() -> None:
    """100 steps of noise sigma reveal as much as one of sigma / 10."""
    planned = row_plan_for(RowTask(500, 1.0, 5, 20), 1.0)
    assert planned.noise_multiplier == pytest.approx(10 * calibrate(1.0, 1e-5, 1.0), rel=1e-3)


def test_a_choice_takes_its_share_of_the_target() -> None:
    chooses = RowTask(500, 0.1, 10, 5, hypotheses=3, choice_epsilon=0.2)
    alone = RowTask(500, 0.1, 10, 5)
    assert row_plan_for(chooses, 3.0).noise_multiplier > row_plan_for(alone, 3.0).noise_multiplier
    with raises(ConfigError, "config.unreachable-epsilon"):
        row_plan_for(RowTask(500, 0.1, 10, 50, hypotheses=3, choice_epsilon=2.0), 0.5)


@pytest.mark.parametrize(
    ("changes", "code", "part"),
    [
        ({"rows": 0}, "impossible-figure", "rows"),
        ({"rate": 0.0}, "impossible-figure", "row-rate"),
        ({"rate": 1.5}, "impossible-figure", "row-rate"),
        ({"steps": 0}, "impossible-figure", "steps"),
        ({"hypotheses": 2}, "open-choice", "choice-epsilon"),
    ],
)
def test_figures_that_cannot_be_are_named(changes: dict[str, Any], code: str, part: str) -> None:
    with raises(ConfigError, f"config.{code}", part):
        RowTask(**{"rows": 500, "rate": 0.1, "steps": 10, "participations": 20} | changes)


def test_trouble_is_warned_of() -> None:
    assert row_plan(TASK, 2.0).warnings == []
    weak, few = row_plan(TASK, 0.3), row_plan(RowTask(500, 0.1, 10, 20), 2.0, 0.001)
    assert "Above 20" in weak.warnings[0]
    assert "500 rows outright" in few.warnings[0]
