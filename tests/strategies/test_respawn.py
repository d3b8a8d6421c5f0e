"""A hypothesis that nobody trains is reborn as half of a group that consists of two, worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.errors import raises
from umbel.protocol.errors import ConfigError
from umbel.server.setup import Setup
from umbel.simulation.in_process import play
from umbel.strategies.respawn import by_chance, cosines, halves, respawned

# Twelve clients, each with a direction of its own; those of even numbers also go one way, and the others another.
OWN, FIRST, SECOND, FAR = np.eye(15)[:12], *np.eye(15)[12:]
ODD = np.arange(12) % 2 == 1
TWO_KINDS = OWN + 3 * np.where(ODD[:, None], SECOND, FIRST)
SENT = np.stack([np.zeros(15), 100 * FAR])
ALL = np.zeros(12, np.int64)


def mean(releases: NDArray[np.float64]) -> list[float]:
    return list(releases.mean(axis=0).round(6).tolist())


def after(rounds: list[NDArray[np.float64]], labels: NDArray[np.int64] = ALL, **changes: Any) -> list[list[float]]:
    """Return the hypotheses after rounds of such releases, each of which starts from `SENT`."""
    state: dict[str, NDArray[Any]] = {}
    for number, releases in enumerate(rounds, 1):
        means = [releases[labels == j].mean(axis=0) if (labels == j).any() else SENT[j] for j in range(2)]
        moved = respawned(state, changes.get("after", 2), number, np.stack(means), SENT, releases, labels)
    return moved.round(6).tolist()


def test_lengths_do_not_count_and_who_did_not_move_agrees_with_nobody() -> None:
    found = cosines(np.array([[2.0, 0.0], [0.0, 0.5], [-3.0, 0.0], [0.0, 0.0]]))
    np.testing.assert_allclose(found, [[1, 0, -1, 0], [0, 1, 0, 0], [-1, 0, 1, 0], [0, 0, 0, 0]])


def test_updates_are_measured_from_a_centre() -> None:
    random = np.random.default_rng(5)
    vectors, centre = random.normal(size=(6, 70_000)).astype(np.float32), random.normal(size=70_000)
    updates = vectors[[0, 2, 5]] - centre  # of more numbers than a block
    lengths = np.linalg.norm(updates, axis=1)
    expected = updates @ updates.T / np.outer(lengths, lengths)
    np.testing.assert_allclose(cosines(vectors, centre, np.array([0, 2, 5])), expected, rtol=1e-12)


def test_the_halves_are_those_that_go_the_same_way() -> None:
    found = halves(TWO_KINDS)
    for lengths in (1, np.logspace(-3, 3, 12)[:, None]):
        assert halves(TWO_KINDS * lengths).second.tolist() == ODD.tolist()
    assert found.gap == found.dimensions == np.inf, "all other eigenvalues are the same, 1 / 10"


@pytest.mark.parametrize(("count", "dimensions"), [(4, 210), (20, 11)])
def test_clients_of_one_kind_seldom_look_like_two(count: int, dimensions: int) -> None:
    """What has a chance of 1 in 100 comes about so often: more than 12 times in 400 with probability .0003."""
    random = np.random.default_rng(9)
    updates = random.normal(size=dimensions) + random.normal(size=(400, count, dimensions))
    found = [halves(one) for one in updates]
    assert sum(by_chance(one.gap, count, one.dimensions) <= 0.01 for one in found) <= 12


def test_in_one_dimension_any_gap_can_be_chance() -> None:
    line = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.1], [1.0, 0.1], [1.0, 0.1], [1.0, 0.0]])
    found = halves(line)
    assert found.gap > 1e6
    assert by_chance(found.gap, 6, found.dimensions) > 0.9


def test_dimensions_are_those_that_random_directions_lie_in() -> None:
    random = np.random.default_rng(10)
    told = [halves(random.normal(size=(40, 20))).dimensions for _ in range(20)]
    assert np.median(told) == pytest.approx(20, rel=0.2)


@pytest.mark.parametrize("nu", [0, 3])
@pytest.mark.parametrize("kinds", [1, 2])
def test_noise_in_many_dimensions_changes_neither_the_halves_nor_the_gap(nu: float, kinds: int) -> None:
    random = np.random.default_rng(7)
    ways = random.normal(size=(kinds, 20_000))
    updates = ways[np.arange(20) % kinds] + 2 * random.normal(size=(20, 20_000))
    noise = random.normal(size=updates.shape)
    noise *= nu * np.linalg.norm(updates, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    found = halves(updates + noise)
    if kinds == 1:
        assert found.gap < 0.5
    else:
        assert found.second.tolist() == (np.arange(20) % 2 == 1).tolist()
        assert found.gap > 1
        assert by_chance(found.gap, 20, found.dimensions) == 0.001


def test_an_idle_hypothesis_is_reborn_as_the_mean_of_one_half_and_the_other_moves_to_that_of_the_rest() -> None:
    assert after([TWO_KINDS] * 2) == [mean(TWO_KINDS[~ODD]), mean(TWO_KINDS[ODD])]


def test_it_waits_as_long_as_it_is_told() -> None:
    assert after([TWO_KINDS]) == after([TWO_KINDS] * 2, after=3) == [mean(TWO_KINDS), mean(SENT[1:])]


@pytest.mark.parametrize(
    ("wait", "used", "releases"),
    [
        (2, [ALL, np.where(ODD, 1, 0), ALL], TWO_KINDS),
        (1, [ALL] * 3, OWN + 3 * FIRST),
        (1, [ALL[:3]] * 2, TWO_KINDS[:3]),
    ],
    ids=["used again, it begins to wait anew", "a group of one kind", "too few releases"],
)
def test_no_group_is_split(wait: int, used: list[NDArray[np.int64]], releases: NDArray[np.float64]) -> None:
    state: dict[str, NDArray[Any]] = {}
    for number, labels in enumerate(used, 1):
        moved = respawned(state, wait, number, SENT, SENT, releases, labels)
    assert moved.tolist() == SENT.tolist()


def test_a_release_that_strays_does_not_keep_a_hypothesis() -> None:
    # Of twelve releases each would have six: one is less than a quarter of that, two are not.
    one, two = (np.where(np.arange(12) < n, 1, 0) for n in (1, 2))
    assert after([TWO_KINDS] * 2, one)[1] == mean(TWO_KINDS[2::2])
    assert after([TWO_KINDS] * 2, two)[1] == mean(TWO_KINDS[:2])


def test_a_small_group_keeps_its_hypothesis() -> None:
    # One client of twelve, whose release lies near the second hypothesis.
    releases = TWO_KINDS.copy()
    releases[0] = SENT[1] + OWN[0]
    assert after([releases] * 3, np.where(np.arange(12) < 1, 1, 0))[1] == releases[0].tolist()


def test_clients_are_trusted() -> None:
    """Two of twenty can hide two kinds, or have clients that are all alike split: the docs say so."""
    random = np.random.default_rng(9)
    noise = random.normal(size=(20, 20_000))
    two_kinds = 0.5 * random.normal(size=(2, 20_000))[np.arange(20) % 2]
    line = random.normal(size=20_000) * np.array([[1], [-1]])
    assert [reborn(one) for one in (noise, two_kinds + noise)] == [False, True]
    assert [reborn(np.concatenate([line, one[2:]])) for one in (noise, two_kinds + noise)] == [True, False]
    # As a small group would be, whose clients are honest.
    assert halves(np.concatenate([line[[0, 0]], noise[2:]]))[0].tolist() == [False] * 2 + [True] * 18
    assert reborn(np.concatenate([line[[0, 0]], noise[2:]]))


def reborn(releases: NDArray[np.float64]) -> bool:
    """Return whether releases of the first of two hypotheses have the second reborn."""
    sent = np.zeros((2, releases.shape[1]))
    return bool(respawned({}, 1, 1, sent, sent, releases, np.zeros(len(releases), np.int64)).any())


def test_it_is_not_for_a_number_of_hypotheses_that_is_chosen(run_config: dict[str, Any]) -> None:
    with raises(ConfigError, "config.hypotheses", "auto", "hypotheses"):
        Setup.parse(run_config | {"hypotheses": "auto", "strategy": "group-privacy respawn=3"})


def test_a_run_with_it_goes_through_and_keeps_how_long_hypotheses_wait(run_config: dict[str, Any]) -> None:
    run = play(run_config | {"rounds": 3, "strategy": "group-privacy respawn=2"})
    assert run.strategy.state["respawn/idle"].shape == (2,)
