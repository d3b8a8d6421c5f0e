"""R-DPCFL's start: the first round's releases are clustered, and the clusters' means are the hypotheses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.helpers.errors import raises
from tests.helpers.scripted import on, sends
from tests.strategies.conftest import one_round
from tests.strategies.test_how_many import GROUPS, dataset
from umbel.data import Manifest, write_leaf
from umbel.nodes.fleet import Fleet
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import TrainingSpec
from umbel.server.setup import Setup
from umbel.simulation.baselines import rand_index
from umbel.simulation.in_process import play
from umbel_lab.strategies import RDPCFL
from umbel_lab.strategies.r_dpcfl import CLUSTERS, mixture, release_variance

NAME = "umbel_lab.strategies:RDPCFL"

APART = [[1.0, 0.1, 0], [1.0, -0.1, 0], [-1.0, 0.1, 0], [1.1, 0, 0], [-1.0, -0.1, 0]]
EAST = np.array([0.5, 0, 0])
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
    moved, _ = one_round(strategy, found, dict(enumerate(APART + EAST)), round=2)
    np.testing.assert_allclose(moved, found + EAST, atol=1e-6)
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
    config = RunConfig.parse(ROWS | {"dataset": str(tmp_path / "zeros.json"), "rounds": 1, "strategy": NAME})
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
        Setup.parse(RunConfig.parse({"strategy": NAME, "clients-per-round": 40} | changes).entries())


def test_a_run_finds_three_groups(tmp_path: Path, run_config: dict[str, Any]) -> None:
    run_config |= {"strategy": NAME, "hypotheses": 3, "rounds": 60, "clients-per-round": 40, "restarts": 1}
    run_config |= {"noise-multiplier": 0.0, "validation": "every=60", "max-participations": 0}
    found = play(run_config | {"dataset": dataset(tmp_path, 3, 0)}).state.best["weight"].reshape(-1, 2)
    for truth in GROUPS[:3]:
        assert np.linalg.norm(found - np.array(truth), axis=1).min() < 1
