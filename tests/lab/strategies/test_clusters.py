"""Sattler's clustering splits a hypothesis whose clients go different ways, and R-DPCFL's the first releases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tests.helpers.errors import raises
from tests.helpers.scripted import on, sends
from tests.strategies.conftest import one_round
from tests.strategies.test_how_many import GROUPS, dataset
from umbel import strategies
from umbel.data import Manifest, write_leaf
from umbel.nodes.fleet import Fleet
from umbel.protocol.errors import ConfigError
from umbel.protocol.releases import Releases
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import TrainingSpec
from umbel.server.setup import Setup
from umbel.simulation.baselines import rand_index
from umbel.simulation.in_process import play
from umbel_lab.strategies import RDPCFL, ClusteredFL
from umbel_lab.strategies.cfl import SplitOptions, bipartition
from umbel_lab.strategies.r_dpcfl import CLUSTERS, mixture, release_variance

CFL = "umbel_lab.strategies:ClusteredFL"

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
        on(Fleet(), strategies.make(RunConfig(strategy=f"{CFL} eps1=0")))
    for hypotheses in (0, 1):
        with raises(ConfigError, "config.hypotheses", "hypotheses"):
            Setup.parse(RunConfig(strategy=CFL, hypotheses=hypotheses, clients_per_round=40).entries())


def test_there_are_no_more_than_the_run_says_and_each_is_split_by_itself() -> None:
    far = [(100 + x, y) for x, y in EAST + WEST]
    assert len(round_of(on(Fleet(), ClusteredFL(hypotheses=9)), EAST + WEST + far, [(0, 0), (100, 0)])) == 4
    found = round_of(on(Fleet(), ClusteredFL(hypotheses=3)), EAST + WEST + far, [(0, 0), (100, 0)])
    np.testing.assert_allclose(found, [np.mean(EAST, 0), np.mean(far, 0), np.mean(WEST, 0)], rtol=1e-6)


def test_a_run_finds_two_groups_and_leaves_one_whole(tmp_path: Path, run_config: dict[str, Any]) -> None:
    run_config |= {"strategy": CFL, "hypotheses": 4, "rounds": 60, "clients-per-round": 40, "restarts": 2}
    run_config |= {"noise-multiplier": 0.1, "validation": "every=20"}
    for groups in (1, 2):
        run = play(run_config | {"dataset": dataset(tmp_path, groups, 0)})
        found = run.state.best["weight"].reshape(-1, 2)
        assert len(found) == groups
        for truth in GROUPS[:groups]:
            assert np.linalg.norm(found - np.array(truth), axis=1).min() < 1


# --- R-DPCFL: the means of clusters of the first round's releases are the hypotheses


START = "umbel_lab.strategies:RDPCFL"

APART = [[1.0, 0.1, 0], [1.0, -0.1, 0], [-1.0, 0.1, 0], [1.1, 0, 0], [-1.0, -0.1, 0]]
MOVE = np.array([0.5, 0, 0])
ROWS = {
    "protect": "rows", "noise-multiplier": 0.0, "clipping": "update",
    "rows": "clip=3 noise=2 rate=1 batch=12", "local-steps": 4, "step-size": 0.5,
}  # fmt: skip


def test_the_first_releases_become_hypotheses_and_later_ones_move_them() -> None:
    fleet = Fleet(RunConfig(clients_per_round=5, clipping="update"))
    strategy = on(fleet, RDPCFL(hypotheses=2))
    found, _ = one_round(strategy, [[0.0] * 3], dict(enumerate(APART)))
    np.testing.assert_allclose(found[found[:, 0].argsort()], [[-1, 0, 0], [3.1 / 3, 0, 0]], atol=1e-6)
    clusters = strategy.state[CLUSTERS]
    assert rand_index([0, 0, 1, 0, 1], clusters) == 1
    moved, _ = one_round(strategy, found, dict(enumerate(APART + MOVE)), round=2)
    np.testing.assert_allclose(moved, found + MOVE, atol=1e-6)
    # A round of too few releases leaves one hypothesis.
    three = on(Fleet(RunConfig(clients_per_round=2)), RDPCFL(hypotheses=3))
    assert one_round(three, [[0.0] * 3], {0: [1.0, 0, 0], 1: [3.0, 0, 0]})[0].tolist() == [[2, 0, 0]]


def test_a_small_cluster_counts_as_much_as_large_ones() -> None:
    # Means of length 2 n^(1/4) with noise of 1; of 1.2 n^(1/4) they would be too near.
    random, true = np.random.default_rng(0), np.repeat([0, 1, 2, 3], [3, 6, 6, 6])
    means = random.standard_normal((4, 1000))
    means *= 2 * 1000**0.25 / np.linalg.norm(means, axis=1, keepdims=True)
    points = means[true] + random.standard_normal((21, 1000))
    shares = mixture(points, 4, 1.0)
    assert shares.sum(1) == pytest.approx(np.ones(21))
    assert rand_index(true, shares.argmax(1)) == 1


def test_the_means_of_large_models_are_those_of_their_clusters() -> None:
    random, true = np.random.default_rng(0), np.array([0, 1, 1, 0, 1, 0])
    sent = random.standard_normal((1, 70_000))  # more numbers than a block
    releases = (sent + random.standard_normal((2, 70_000))[true] + 0.1).astype(np.float32)
    strategy = on(Fleet(), RDPCFL(hypotheses=2))
    sends(strategy, {"weight": sent}, TrainingSpec())
    found = strategy.reshape(1, sent, sent, releases, np.zeros(6, np.int64))
    clusters = strategy.state[CLUSTERS]
    assert rand_index(true, clusters) == 1
    means = [releases[clusters == j].mean(axis=0, dtype=float) for j in (0, 1)]
    np.testing.assert_allclose(found, means, rtol=0, atol=1e-12)


def test_differences_smaller_than_the_noise_are_no_clusters() -> None:
    points = np.array([[-1.0], [-1.1], [1.0], [1.1]])
    assert mixture(points, 2, 0.0).max(1) == pytest.approx(np.ones(4))
    assert mixture(points, 2, 100.0) == pytest.approx(np.full((4, 2), 0.5), abs=0.01)
    assert mixture(np.ones((4, 3)), 2, 0.0).sum(1) == pytest.approx(np.ones(4)), "identical points"


def test_the_noise_of_each_step_adds_up() -> None:
    # 4 steps of .5 * 2 * 3 / 12 = .25 each.
    assert release_variance(RunConfig.parse(ROWS).training(), 7) == pytest.approx(4 * 0.25**2)
    task = TrainingSpec(noise_multiplier=2.0, mechanism="gaussian", clip_norm=3.0)
    assert release_variance(task, 7) == pytest.approx(36)


def test_the_noise_is_that_of_a_release(tmp_path: Path) -> None:
    # Rows of zeros have no gradient, so a release is noise alone.
    manifest = Manifest(name="zeros", model="linear inputs=400 outputs=1", loss="mse", clients=3,
                        split={"train": 2, "validation": 1})  # fmt: skip
    write_leaf(tmp_path / "zeros.json", manifest, {f"{i}": (np.zeros((12, 400)), np.zeros(12)) for i in range(3)})
    config = RunConfig.parse(ROWS | {"dataset": str(tmp_path / "zeros.json"), "rounds": 1, "strategy": START})
    run = play(config.entries() | {"clients-per-round": 2, "rows": "clip=1e-3 noise=2 rate=1 batch=12"})
    both = run.state.hypotheses
    squares = sum(np.square(value).reshape(2, -1)[:, :400].sum() for name, value in both.items() if "weight" in name)
    # A false alarm in one of 1,000 draws; each of the two hypotheses is one release.
    low, high = stats.chi2(800).ppf([0.0005, 0.9995])
    assert low < squares / release_variance(run.setup.task(), 400) < high


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"hypotheses": 0}, "config.hypotheses"),
        ({"hypotheses": 1}, "config.hypotheses"),
        (ROWS | {"optimizer": "adam"}, "config.row-noise"),
        (ROWS | {"optimizer": "momentum"}, "config.row-noise"),
    ],
)
def test_a_run_without_clusters_or_with_unknown_noise_is_refused(changes: dict[str, Any], code: str) -> None:
    with raises(ConfigError, code, "RDPCFL"):
        Setup.parse(RunConfig.parse({"strategy": START, "clients-per-round": 40} | changes).entries())


def test_a_run_finds_three_groups(tmp_path: Path, run_config: dict[str, Any]) -> None:
    run_config |= {"strategy": START, "hypotheses": 3, "rounds": 60, "clients-per-round": 40, "restarts": 1}
    run_config |= {"noise-multiplier": 0.0, "validation": "every=60", "max-participations": 0}
    found = play(run_config | {"dataset": dataset(tmp_path, 3, 0)}).state.best["weight"].reshape(-1, 2)
    for truth in GROUPS[:3]:
        assert np.linalg.norm(found - np.array(truth), axis=1).min() < 1
