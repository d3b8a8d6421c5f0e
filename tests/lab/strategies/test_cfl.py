"""Sattler's clustering: a hypothesis is split where its clients go different ways."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.errors import raises
from tests.helpers.scripted import on, sends
from tests.strategies.test_how_many import GROUPS, dataset
from umbel import strategies
from umbel.nodes.fleet import Fleet
from umbel.protocol.errors import ConfigError
from umbel.protocol.releases import Releases
from umbel.protocol.run_config import RunConfig
from umbel.server.setup import Setup
from umbel.simulation.in_process import play
from umbel_lab.strategies import ClusteredFL
from umbel_lab.strategies.cfl import SplitOptions, bipartition

NAME = "umbel_lab.strategies:ClusteredFL"

EAST, WEST = [(1.0, 0.1), (1.0, -0.1), (0.9, 0.0)], [(-1.0, 0.1), (-1.0, 0.0), (-1.0, -0.1)]


def round_of(strategy: ClusteredFL, releases: Any, sent: Any = ((0.0, 0.0),)) -> NDArray[np.float64]:
    """Return the hypotheses after a round in which these were released."""
    vectors = np.array(releases, float)
    sends(strategy, {"weight": np.array(sent, np.float32)})
    outcome = strategy.learn(1, Releases(vectors, np.arange(len(vectors)), None, len(vectors), 0))
    assert outcome.following is not None
    assert outcome.counts.sum() == len(vectors)
    following: NDArray[np.float64] = outcome.following["weight"]
    return following


def test_the_parts_are_those_between_which_the_largest_cosine_is_smallest() -> None:
    degrees = np.radians([0, 30, 200, 50, 170])
    second, gap = bipartition(np.stack([np.cos(degrees), np.sin(degrees)], axis=1) * [[1], [9], [2], [1], [5]])
    assert second.tolist() == [False, False, True, False, True]
    # 50 and 170 are nearest, at 120 degrees, of which the cosine is -1/2.
    assert gap == pytest.approx(math.sqrt(0.75))


def four() -> ClusteredFL:
    return on(Fleet(), ClusteredFL(hypotheses=4))


def test_clients_that_pull_apart_are_split_into_their_means_and_others_averaged() -> None:
    np.testing.assert_allclose(round_of(four(), EAST + WEST), [np.mean(EAST, 0), np.mean(WEST, 0)], rtol=1e-6)
    for releases, why in (
        ([*EAST, (0.5, 0.2)], "all go one way"),
        ([(1, 0), (0, 1), (-1, 0), (0, -1)], "there is no gap"),
        (EAST + WEST[:1], "one client alone is no part"),
        ([EAST[0], *WEST[:2]], "three clients are no two parts"),
    ):
        np.testing.assert_allclose(round_of(four(), releases), [np.mean(releases, 0)], rtol=1e-6, err_msg=why)
    strategy = four()
    for longest, parts in ((50.0, 1), (19.0, 2)):  # 1 is no more than a twentieth of 50: such a cluster is at its end
        strategy.state["cfl/longest"] = np.asarray(longest)
        assert len(round_of(strategy, EAST + WEST)) == parts
    strict = on(Fleet(), ClusteredFL(hypotheses=4, **vars(SplitOptions(gamma=1.0))))
    assert len(round_of(strict, EAST + WEST)) == 1, "options say when"


def test_options_and_runs_that_could_split_nothing_are_refused() -> None:
    with raises(ConfigError, "config.option-value", "0", "strategy"):
        on(Fleet(), strategies.make(RunConfig(strategy=f"{NAME} eps1=0")))
    for hypotheses in (0, 1):
        with raises(ConfigError, "config.hypotheses", "hypotheses"):
            Setup.parse(RunConfig(strategy=NAME, hypotheses=hypotheses, clients_per_round=40).entries())


def test_there_are_no_more_than_the_run_says_and_each_is_split_by_itself() -> None:
    far = [(100 + x, y) for x, y in EAST + WEST]
    assert len(round_of(on(Fleet(), ClusteredFL(hypotheses=9)), EAST + WEST + far, [(0, 0), (100, 0)])) == 4
    found = round_of(on(Fleet(), ClusteredFL(hypotheses=3)), EAST + WEST + far, [(0, 0), (100, 0)])
    np.testing.assert_allclose(found, [np.mean(EAST, 0), np.mean(far, 0), np.mean(WEST, 0)], rtol=1e-6)


def test_clusters_of_large_models_are_split_as_their_updates_go() -> None:
    random, n = np.random.default_rng(7), 70_000  # more numbers than a block
    sent = random.normal(size=(2, n)).astype(np.float32)
    near, sign = np.arange(12) % 2, np.where(np.arange(12) < 6, 1.0, -1.0)
    apart = sign[:, None] * random.normal(size=(2, n))[near] * 0.1
    releases = (sent[near] + apart + 0.05 * random.normal(size=(12, n))).astype(np.float32)
    found = round_of(on(Fleet(), ClusteredFL(hypotheses=3)), releases.astype(float), sent)
    updates = releases[near == 0] - sent[0].astype(float)
    second, gap = bipartition(updates)
    assert gap > 0.7
    assert second.tolist() == (sign[near == 0] < 0).tolist()
    parts = [sent[0] + updates[~second].mean(0), releases[near == 1].mean(0, float), sent[0] + updates[second].mean(0)]
    np.testing.assert_allclose(found, parts, rtol=1e-5, atol=1e-6)


def test_a_run_finds_two_groups_and_leaves_one_whole(tmp_path: Path, run_config: dict[str, Any]) -> None:
    run_config |= {"strategy": NAME, "hypotheses": 4, "rounds": 60, "clients-per-round": 40, "restarts": 2}
    run_config |= {"noise-multiplier": 0.1, "validation": "every=20"}
    for groups in (1, 2):
        run = play(run_config | {"dataset": dataset(tmp_path, groups, 0)})
        found = run.state.best["weight"].reshape(-1, 2)
        assert len(found) == groups
        for truth in GROUPS[:groups]:
            assert np.linalg.norm(found - np.array(truth), axis=1).min() < 1
