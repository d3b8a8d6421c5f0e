"""A hypothesis that nobody trains is reborn as half of a group that consists of two, worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import strategies
from protocol.errors import ConfigError
from protocol.plugins import parse_options
from protocol.run_config import RunConfig
from server.setup import Setup
from simulation.in_process import play
from strategies.group_privacy import GroupOptions, GroupPrivacy
from strategies.respawn import halves, respawned

SENT = np.array([[0.0, 0.0, 0.0], [9.0, 9.0, 9.0]])
# Clients 0, 2 and 4 go one way, and 1, 3 and 5 another; none of them as far as the next.
TWO_KINDS = np.array([[1, 0, 0.1], [0, 1, 0.1], [2, 0, 0.1], [0, 2, 0.1], [3, 0, 0], [0, 3, 0]], float)
ODD = np.arange(6) % 2 == 1
ALL = np.zeros(6, np.int64)


def after(rounds: list[NDArray[np.float64]], labels: NDArray[np.int64] = ALL, **changes: Any) -> list[list[float]]:
    """Return the hypotheses after rounds of such releases, each of which starts from `SENT`."""
    state: dict[str, NDArray[Any]] = {}
    for number, releases in enumerate(rounds, 1):
        means = [releases[labels == j].mean(axis=0) if (labels == j).any() else SENT[j] for j in range(2)]
        moved = respawned(state, changes.get("after", 2), number, np.stack(means), SENT, releases, labels)
    return moved.round(6).tolist()


def test_the_halves_are_those_that_go_the_same_way() -> None:
    second, gap = halves(TWO_KINDS)
    assert second.tolist() == ODD.tolist()
    assert gap > 5


def test_lengths_play_no_part() -> None:
    assert halves(TWO_KINDS * [[1e3], [1], [1e-3], [1], [1], [0.1]])[0].tolist() == ODD.tolist()


@pytest.mark.parametrize("nu", [0, 1, 3])
def test_noise_in_many_dimensions_hides_neither_the_halves_nor_the_gap(nu: float) -> None:
    random = np.random.default_rng(7)
    ways = random.normal(size=(2, 20_000))
    updates = ways[np.arange(20) % 2] + 2 * random.normal(size=(20, 20_000))
    noise = random.normal(size=updates.shape)
    noise *= nu * np.linalg.norm(updates, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    second, gap = halves(updates + noise)
    assert second.tolist() == (np.arange(20) % 2 == 1).tolist()
    assert gap > 1


@pytest.mark.parametrize("nu", [0, 3])
def test_clients_of_one_kind_have_no_gap(nu: float) -> None:
    random = np.random.default_rng(8)
    updates = random.normal(size=20_000) + 2 * random.normal(size=(20, 20_000))
    noise = random.normal(size=updates.shape)
    noise *= nu * np.linalg.norm(updates, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    assert halves(updates + noise)[1] < 0.5


def test_an_idle_hypothesis_is_reborn_as_the_mean_of_one_half_and_the_other_moves_to_that_of_the_rest() -> None:
    assert after([TWO_KINDS] * 2) == [[2, 0, 0.066667], [0, 2, 0.066667]]


def test_it_waits_as_long_as_it_is_told() -> None:
    assert after([TWO_KINDS]) == after([TWO_KINDS] * 2, after=3) == [[1, 1, 0.066667], [9, 9, 9]]


def test_a_hypothesis_that_is_used_again_begins_to_wait_anew() -> None:
    state: dict[str, NDArray[Any]] = {}
    both = np.array([0, 1, 0, 1, 0, 1])
    for number, labels in enumerate([ALL, both, ALL], 1):
        moved = respawned(state, 2, number, SENT, SENT, TWO_KINDS, labels)
    assert moved.tolist() == SENT.tolist()


def test_a_release_that_strays_does_not_keep_a_hypothesis() -> None:
    # Twenty releases, ten for each if they were shared evenly: two are less than a quarter of that, three are not.
    releases = np.concatenate([TWO_KINDS, TWO_KINDS, TWO_KINDS, TWO_KINDS[:2]])
    few, enough = (np.where(np.arange(20) < n, 1, 0) for n in (2, 3))
    assert after([releases] * 2, few)[1] == [0, 2, 0.066667]
    assert after([releases] * 2, enough)[1] == releases[:3].mean(axis=0).round(6).tolist()


def test_a_group_of_one_kind_is_not_split() -> None:
    releases = np.eye(6) + 5
    state: dict[str, NDArray[Any]] = {}
    sent = np.zeros((2, 6))
    for number in (1, 2, 3):
        moved = respawned(state, 1, number, sent, sent, releases, ALL)
    assert moved.tolist() == sent.tolist()


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


def test_too_few_releases_are_not_split() -> None:
    assert after([TWO_KINDS[:3]] * 2, ALL[:3])[1] == [9, 9, 9]


def test_without_the_option_the_papers_algorithm_is_as_it_was() -> None:
    assert strategies.make(RunConfig()).options.respawn == 0


def test_it_is_not_for_a_number_of_hypotheses_that_is_chosen(run_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='hypotheses = "auto" drops hypotheses that respawn brings back'):
        Setup.parse(run_config | {"hypotheses": "auto", "strategy-options": "respawn=3"})


def test_a_strategy_of_ones_own_has_the_option_where_its_options_are_derived() -> None:
    @dataclass(frozen=True)
    class Derived(GroupOptions):
        momentum: float = 0.9

    class Own(GroupPrivacy):
        Options = Derived

    options = parse_options(Own.Options, "respawn=3 momentum=0.5", "strategy-options")
    assert GroupPrivacy.Options is GroupOptions
    assert (Own(options=options)._respawn, options.momentum) == (3, 0.5)


def test_a_run_with_it_goes_through_and_keeps_how_long_hypotheses_wait(run_config: dict[str, Any]) -> None:
    run = play(run_config | {"rounds": 3, "strategy-options": "respawn=2"})
    assert run.strategy.state["respawn/idle"].shape == (2,)
