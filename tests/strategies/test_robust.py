"""With a fifth of the clients hostile the trimmed mean and the geometric median hold where the mean does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from tests.helpers.noise import sanitise
from tests.helpers.scripted import on
from umbel import models, strategies
from umbel.nodes.fleet import Fleet
from umbel.protocol.arrays import Matrix
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping
from umbel.protocol.run_config import RunConfig
from umbel.strategies import GeometricMedian, GroupPrivacy, TrimmedMean
from umbel.strategies.robust import HostileOptions, Robust

# --- by hand


def ready(kind: type[Robust], few: int, reach: float = np.inf) -> Robust:
    """Return a strategy that has seen a round."""
    strategy = on(Fleet(), kind())
    strategy._few, strategy._reach = few, reach
    return strategy


def test_as_many_values_as_may_be_hostile_are_left_out_at_each_end() -> None:
    group = np.array([[0.0, 9], [100, 1], [2, 2], [4, 3], [3, -70]])
    assert ready(TrimmedMean, 1).combine(group, np.zeros(2), 0).tolist() == [3, 2]
    assert ready(TrimmedMean, 2).combine(group, np.zeros(2), 0).tolist() == [3, 2]
    assert ready(TrimmedMean, 0).combine(group, np.zeros(2), 0).tolist() == group.mean(axis=0).tolist()


def test_the_geometric_median_of_a_line_is_its_median_and_of_a_triangle_its_fermat_point() -> None:
    line = np.array([[0.0, 0], [1, 0], [2, 0], [3, 0], [1e6, 0]])
    np.testing.assert_allclose(ready(GeometricMedian, 0).combine(line, np.zeros(2), 0), [2, 0], atol=0.05)
    corners = np.array([[0.0, 0], [1, 0], [0.5, np.sqrt(3) / 2]])
    middle = ready(GeometricMedian, 0).combine(corners, np.ones(2), 0)
    np.testing.assert_allclose(middle, [0.5, np.sqrt(3) / 6], atol=1e-4)


def test_models_of_more_numbers_than_a_block_have_the_same_centres() -> None:
    rng = np.random.default_rng(3)
    sent = rng.normal(size=(2, 70_000))
    releases = (np.repeat(sent, 4, axis=0) + rng.normal(size=(8, 70_000)) * np.arange(1, 9)[:, None]).astype(np.float32)
    trimmed, median = (on(Fleet(), kind(**vars(HostileOptions(0.2)))) for kind in (TrimmedMean, GeometricMedian))
    away = np.linalg.norm(releases - np.repeat(sent, 4, axis=0), axis=1)
    for strategy in (trimmed, median):
        assert strategy.assign(releases, sent, None).tolist() == [0] * 4 + [1] * 4
        assert strategy._reach == pytest.approx(2 * np.median(away))
        strategy._reach = 6.5 * 70_000**0.5  # some are longer
    steps = releases[4:] - sent[1]
    steps *= np.minimum(1, trimmed._reach / away[4:])[:, None]
    found = trimmed.combine(releases[4:], sent[1], 1)
    np.testing.assert_allclose(found, sent[1] + np.sort(steps, axis=0)[1:-1].mean(axis=0), rtol=0, atol=1e-12)
    centre = steps.mean(axis=0)
    for _ in range(50):
        centre = np.average(steps, axis=0, weights=1 / np.linalg.norm(steps - centre, axis=1))
    np.testing.assert_allclose(median.combine(releases[4:], sent[1], 1), sent[1] + centre, rtol=0, atol=1e-4)
    assert trimmed.assign(releases, sent[:1], None).tolist() == [0] * 8


@pytest.mark.parametrize("kind", [TrimmedMean, GeometricMedian])
def test_equal_points_have_that_centre_and_a_group_that_may_be_hostile_as_a_whole_leaves_its_hypothesis(
    kind: type[Robust],
) -> None:
    group, sent = np.full((5, 2), 7.0), np.zeros(2)
    assert ready(kind, 1, reach=0.0).combine(group, np.full(2, 7.0), 0).tolist() == [7, 7]
    assert ready(kind, 1).combine(group, sent, 0).tolist() == pytest.approx([7, 7])
    assert ready(kind, 2).combine(np.full((2, 2), 1e9), sent, 0) is sent


def test_a_share_is_the_decimal_number_that_it_says() -> None:
    """29 of 100 releases may be hostile, though .29 * 100 is 28.999999999999996."""
    strategy = ready(TrimmedMean, 0)
    strategy.options = HostileOptions(0.29)
    strategy.assign(np.zeros((100, 1), np.float32), np.zeros((2, 1)), None)
    assert strategy._few == 29


@pytest.mark.parametrize("kind", [TrimmedMean, GeometricMedian])
@pytest.mark.parametrize("distance", [20.0, 1e30])
def test_a_fifth_far_away_captures_no_hypothesis(kind: type[Robust], distance: float) -> None:
    """Eight honest releases near each of two hypotheses, and four elsewhere."""
    rng = np.random.default_rng(1)
    sent = np.array([[0.0, 0.0], [6.0, 0.0]])
    honest = np.repeat(sent, 8, axis=0) + rng.normal(size=(16, 2)) * 0.5
    strategy = on(Fleet(), kind(hypotheses=2, **vars(HostileOptions(0.2))))
    points = np.concatenate([honest, np.full((4, 2), distance)])
    labels = strategy.assign(points, sent, None)
    assert labels[:16].tolist() == [0] * 8 + [1] * 8
    for j in (0, 1):
        assert np.linalg.norm(strategy.combine(points[labels == j], sent[j], j) - sent[j]) < 1.0
    captured = on(Fleet(), GroupPrivacy()).assign(points, sent, None)[:16]
    assert set(captured.tolist()) == {0}, "where by k-means all honest ones share what is left"


@pytest.mark.parametrize("kind", [TrimmedMean, GeometricMedian])
def test_no_hypothesis_moves_further_than_twice_the_median_release(kind: type[Robust]) -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        sent, points = rng.normal(size=(3, 4)), rng.standard_cauchy((30, 4)) * 10.0 ** rng.uniform(0, 6, (30, 1))
        strategy = on(Fleet(), kind(hypotheses=3, **vars(HostileOptions(0.2))))
        labels = strategy.assign(points, sent, None)
        nearest = np.linalg.norm(points[:, None] - sent, axis=2).min(axis=1)
        for j in np.unique(labels).tolist():
            step = strategy.combine(points[labels == j], sent[j], j) - sent[j]
            # Of a trimmed mean each coordinate is bounded, and so is the length up to the root of their number.
            assert np.linalg.norm(step) <= 2 * np.median(nearest) * (2 if kind is TrimmedMean else 1 + 1e-9)


def test_the_share_is_an_option_and_what_cannot_work_is_refused() -> None:
    run = RunConfig(strategy="trimmed-mean hostile=0.2")
    assert on(Fleet(), strategies.make(run)).options == HostileOptions(0.2)
    with raises(ConfigError, "config.option-value"):
        on(Fleet(), strategies.make(RunConfig(strategy="geometric-median hostile=0.5")))
    run = RunConfig(strategy="trimmed-mean hostile=0.25", hypotheses=4)
    with raises(ConfigError, "config.option-value"):
        on(Fleet(), strategies.make(run)).check(run, models.load("linear"))


# --- rounds of it: 100 clients in two groups, each with an optimum near its group's, descend the distance to it

OPTIMA = np.array([[5, 6], [4, -4.5]])
"""Of the group privacy paper's synthetic data (Sec. 5.1)."""


def far(sent: Matrix, near: Matrix, honest: Matrix, rng: np.random.Generator) -> Matrix:
    return honest + 1e5 * rng.standard_normal(honest.shape)


def one_place(sent: Matrix, near: Matrix, honest: Matrix, rng: np.random.Generator) -> Matrix:
    return np.full(honest.shape, 1e5)


def flipped(sent: Matrix, near: Matrix, honest: Matrix, rng: np.random.Generator) -> Matrix:
    return near - 10 * (honest - near)


def beside(sent: Matrix, near: Matrix, honest: Matrix, rng: np.random.Generator) -> Matrix:
    """All near one hypothesis, to take it along."""
    return np.tile(sent[1] + 8, (len(honest), 1))


def error(strategy: GroupPrivacy, attack: Any, seed: int, rounds: int = 40, m: int = 100) -> float:
    """Return how far the optimum that is worst off is from the nearest hypothesis, at nu = 1."""
    rng = np.random.default_rng(seed)
    own = OPTIMA[np.arange(m) % 2] + 0.3 * rng.standard_normal((m, 2))
    hostile = np.arange(m) % 5 == 0
    sent = np.array([[3.0, 2.0], [3.0, -2.0]])
    for _ in range(rounds):
        start = sent[np.linalg.norm(own[:, None] - sent, axis=2).argmin(axis=1)]
        releases = start + sanitise(0.35 * (own - start), 1.0, 0.01, Clipping.UPDATE, [rng] * m)
        if attack is not None:
            releases[hostile] = attack(sent, start[hostile], releases[hostile], rng)
        labels, following = strategy.assign(releases, sent, None), sent.copy()
        for j in np.unique(labels).tolist():
            following[j] = strategy.combine(releases[labels == j], sent[j], j)
        sent = following
    return float(max(np.linalg.norm(sent - optimum, axis=1).min() for optimum in OPTIMA))


@pytest.mark.parametrize("attack", [far, one_place, flipped, beside])
def test_robust_centres_hold_with_a_fifth_hostile_where_the_mean_does_not(attack: Any) -> None:
    assert error(on(Fleet(), GroupPrivacy()), attack, seed=0, rounds=15) > 4
    assert error(on(Fleet(), TrimmedMean(**vars(HostileOptions(0.2)))), attack, seed=0) < 1
    assert error(on(Fleet(), GeometricMedian(**vars(HostileOptions(0.2)))), attack, seed=0) < 1


@pytest.mark.parametrize("kind", [GroupPrivacy, TrimmedMean, GeometricMedian])
def test_where_nobody_is_hostile_all_three_find_both_optima(kind: type[GroupPrivacy]) -> None:
    assert error(on(Fleet(), kind()), None, seed=0) < 0.2
