"""Figures of planned runs, and the noise that a wanted guarantee takes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.helpers.errors import raises
from tests.helpers.ledgers import proven, proven_rows
from umbel.privacy.accounting.plan import Task, large_delta, plan, plan_for, row_noise_for
from umbel.privacy.mechanisms.gaussian import calibrate
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Release, ReleaseBy, RowPrivacy, participation

HOSPITAL = Task(parameters=11, hypotheses=5, clients=2062, clients_per_round=100)
ALONE = replace(HOSPITAL, hypotheses=1)


def test_in_999_of_1000_runs_no_client_takes_part_more_often_than_the_plan_says() -> None:
    """A correct plan fails with a chance of 1e-4: of 200 simulated runs 3 or more go past a bound of one in 1,000."""
    figures = plan(HOSPITAL, 3.0, 1.0, rounds=100)
    generator = np.random.default_rng(0)
    counts = np.zeros((200, 2062), int)
    for run in counts:
        for _ in range(100):
            run[generator.choice(2062, 100, replace=False)] += 1
    assert figures.median_participations == np.median(counts)
    assert (counts.max(axis=1) > figures.max_participations).sum() <= 2
    # One less would be too few, by the sum of chances: 2062 clients, each Binomial(100, 100/2062).
    assert 2062 * stats.binom.sf(figures.max_participations - 1, 100, 100 / 2062) > 1e-3


def test_if_all_are_asked_in_every_round_all_take_part_in_every_round() -> None:
    figures = plan(replace(HOSPITAL, clients_per_round=2062), 3.0, 1.0, rounds=7)
    assert (figures.median_participations, figures.max_participations) == (7, 7)
    assert figures.median == figures.maximum == proven({figures.release: 7})


def test_noise_after_averaging_by_hand() -> None:
    """nu = 3, n = 11, 20 releases a hypothesis: |noise|^2 is nu^2 (n + 1)/n / 20 = .491 in radii."""
    figures = plan(HOSPITAL, 3.0, 1.0, rounds=100)
    assert figures.noise_left**2 == pytest.approx(9 * 12 / 11 / 20)
    assert figures.largest_curvature_step == pytest.approx(2 / (1 + 9 * 12 / 11 / 20))
    gaussian = plan(replace(HOSPITAL, mechanism="gaussian"), 3.0, 1.0, rounds=100)
    assert gaussian.noise_left**2 == pytest.approx(9 * 11 / 20)


def test_a_pure_guarantee_takes_the_noise_of_the_formula() -> None:
    """2 * 7 / 3.5 = 4; and with 3 participations of (4 - 3 * .5) / 3 each 2 * 7 * 3 / 2.5 = 16.8.

    A quarter of the target goes to the choice by default.
    """
    small = Task(parameters=7, hypotheses=1, clients=100, clients_per_round=10)
    assert plan_for(small, 4.0, 0.0, 1).release.noise_multiplier == 3.5
    assert plan_for(replace(small, hypotheses=2), 4.0, 0.0, 3, 0.5).release.noise_multiplier == 16.8
    assert plan_for(HOSPITAL, 8.0, 0.0, 4).release.choice_epsilon == 0.5


def test_noise_left_in_the_mean_of_sites_by_hand() -> None:
    """4 sites of 25 clients each, nu = 3: the sum has noise of norm 3 * sqrt(n) * 2 for Gaussian noise, over 100."""
    numbers = {"parameters": 9, "hypotheses": 1, "clients": 100, "clients_per_round": 100}
    sites = Task(**numbers, mechanism="gaussian", by=ReleaseBy.SITE, sites=4)
    assert sites.noise_left(3.0) == pytest.approx(3 * 3 * 2 / 100)


def test_an_open_choice_has_no_guarantee_and_one_hypothesis_no_choice() -> None:
    assert plan(HOSPITAL, 3.0, 0.0, rounds=100).maximum is None
    assert plan(ALONE, 3.0, 0.0, rounds=100).maximum is not None


@pytest.mark.parametrize(
    ("changes", "nu", "rounds", "figures"),
    [
        ({"parameters": 1_206_590}, 3.0, 100, ["epsilon 4,395,664"]),
        ({}, 30.0, 3, [" 7 times "]),
        ({"clients_per_round": 1000}, 10.0, 2, []),
    ],
)
def test_a_plan_of_too_much_epsilon_or_noise_is_warned_of(
    changes: dict[str, Any], nu: float, rounds: int, figures: list[str]
) -> None:
    found = plan(replace(HOSPITAL, **changes), nu, 1.0, rounds=rounds).warnings
    assert [figure in one for one, figure in zip(found, figures, strict=True)] == [True] * len(figures)


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": 0}, {"hypotheses": 0}, {"clients_per_round": 3000}, {"noise_multiplier": 0.0},
        {"noise_multiplier": math.inf}, {"rounds": 0}, {"delta": 1.0}, {"choice_epsilon": -1.0},
    ],
)  # fmt: skip
def test_figures_that_cannot_be_are_named(changes: dict[str, Any]) -> None:
    run: dict[str, Any] = {"noise_multiplier": 3.0, "choice_epsilon": 1.0, "rounds": 10}
    own = {name: value for name, value in changes.items() if name in (*run, "delta")}
    [(name, value)] = changes.items()
    with raises(ConfigError, "config.impossible-figure", name.replace("_", "-"), value):
        plan(replace(HOSPITAL, **{name: value for name, value in changes.items() if name not in own}), **run | own)


# --- backwards


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
@pytest.mark.parametrize("hypotheses", [1, 5])
@pytest.mark.parametrize(("n", "participations"), [(1, 1), (11, 4), (1_206_590, 30)])
def test_the_noise_that_is_worked_out_reaches_the_target_within_one_percent(
    n: int, participations: int, hypotheses: int, mechanism: str
) -> None:
    task = replace(HOSPITAL, parameters=n, hypotheses=hypotheses, mechanism=mechanism)
    figures = plan_for(task, 8.0, 1e-5, participations)
    found = proven({figures.release: participations}, 1e-5)
    assert 8.0 * 0.99 <= found.epsilon <= 8.0
    assert figures.maximum == found


@pytest.mark.parametrize("target", [0.1, 1.0, 50.0])
def test_other_targets_are_reached_as_well(target: float) -> None:
    for delta in (0.0, 1e-9, 1e-3):
        figures = plan_for(HOSPITAL, target, delta, 3)
        assert figures.maximum is not None
        assert 0.99 * target <= figures.maximum.epsilon <= target


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "discrete-gaussian"])
def test_a_delta_that_much_noise_reaches_by_itself_leaves_a_plan(mechanism: str) -> None:
    """At twice the noise that (.01, .01) takes, delta at epsilon 0 is below .01, so the cost is 0."""
    figures = plan_for(replace(ALONE, mechanism=mechanism), 0.01, 0.01, 1)
    reached = figures.maximum
    assert reached is not None
    assert 0.0099 < reached.epsilon <= 0.01
    twice = proven({replace(figures.release, noise_multiplier=2 * figures.release.noise_multiplier): 1}, 0.01)
    assert twice.epsilon == 0


def test_a_target_that_no_noise_reaches_is_named() -> None:
    with raises(ConfigError, "config.unreachable-epsilon", "epsilon 3", "over 4", "choice-epsilon"):
        plan_for(HOSPITAL, 3.0, 0.0, 4, choice_epsilon=1.0)
    with raises(ConfigError, "config.unreachable-epsilon"):
        plan_for(replace(ALONE, mechanism="gaussian"), 3.0, 0.0, 4)
    with raises(ConfigError, "config.open-choice", "choice-epsilon"):
        plan_for(HOSPITAL, 3.0, 1e-5, 4, choice_epsilon=0.0)


# --- backwards: the noise in training that a guarantee for rows needs


def of_rows(sigma: float, rate: float = 0.1, steps: int = 10, hypotheses: int = 1, choice: float = 0.0) -> Release:
    rows = RowPrivacy(1.0, sigma, rate, 50.0, steps)
    return participation(3, hypotheses, 0.0, choice_epsilon=choice, rows=rows)


@pytest.mark.parametrize("target", [0.5, 3.0, 12.0])
def test_the_noise_reaches_the_target_and_less_does_not(target: float) -> None:
    sigma = row_noise_for(of_rows, 20, target)
    reached, less = (proven_rows({of_rows(sigma * factor): 20}).epsilon for factor in (1, 0.998))
    assert reached <= target < less


def test_without_sampling_it_is_the_analytic_calibration() -> None:
    """100 steps of noise sigma reveal as much as one of sigma / 10."""
    sigma = row_noise_for(partial(of_rows, rate=1.0, steps=5), 20, 1.0)
    assert sigma == pytest.approx(10 * calibrate(1.0, 1e-5, 1.0), rel=1e-3)


def test_a_choice_takes_its_share_of_the_target() -> None:
    assert row_noise_for(partial(of_rows, hypotheses=3, choice=0.2), 5, 3.0) > row_noise_for(of_rows, 5, 3.0)
    with raises(ConfigError, "config.unreachable-epsilon"):
        row_noise_for(partial(of_rows, hypotheses=3, choice=2.0), 50, 0.5)
    with raises(ConfigError, "config.open-choice", "choice-epsilon"):
        row_noise_for(partial(of_rows, hypotheses=2), 20, 3.0)


def test_a_delta_that_may_give_a_row_away_is_warned_of() -> None:
    assert large_delta(2e-4, 500, "rows") == []
    assert "500 rows outright" in large_delta(0.001, 500, "rows")[0]
