"""A run of an experiment is a run of the app; each seed has a split of the same clients with the same rows."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import umbel.client.app
from tests.helpers.errors import raises
from umbel.data import Dataset, Manifest, offsets_of, open_dataset, write_dataset
from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.gate.policy import Personal
from umbel.protocol.errors import ConfigError, FleetError
from umbel.protocol.release import Clipping, Kind, Release
from umbel.server.history import State
from umbel.server.observer import Observer, Run, Section
from umbel.server.rounds import initial_hypotheses, run_rounds
from umbel.server.setup import Setup
from umbel.simulation.baselines import personalised
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import run_config
from umbel.simulation.measured import FINE_TUNE, INTERPOLATE, LOCAL_ONLY, finish, shuffled, split_by_seed

pytestmark = pytest.mark.rest


def test_a_run_gives_what_the_apps_own_rounds_give() -> None:
    config = run_config("synthetic", rounds=5, seed=4)
    setup, grid = Setup.parse(config), InProcessGrid(umbel.client.app.app, config, nodes=3)
    start = initial_hypotheses(setup, grid)
    state = State(start, start)
    run_rounds(Run(setup, grid, state))

    finished = finish(config)
    assert finished.state is not None
    np.testing.assert_array_equal(finished.state.best["weight"], state.best["weight"])
    np.testing.assert_array_equal(finished.state.hypotheses["weight"], state.hypotheses["weight"])
    np.testing.assert_array_equal(finished.participations, setup.fleet.participations)
    assert finished.measures["best_loss"] == state.best_loss
    assert finished.release == setup.release
    # n/nu = 2/5 a participation.
    assert finished.measures["max_budget"] == pytest.approx(0.4 * finished.participations.max())
    assert finished.measures["median_budget"] == pytest.approx(0.4 * np.median(finished.participations))
    assert finished.measures["max_participations"] == finished.participations.max()
    # The radius is the norm of a client's own update, and the choice is open.
    assert finished.measures["pure_epsilon"] is None
    assert finished.measures["epsilon"] is None
    assert finished.measures["rounds"] == 5


def test_nothing_bounds_what_unsanitised_releases_cost() -> None:
    measures = finish(run_config("synthetic", rounds=1, strategy="fedavg", noise_multiplier=0.0)).measures
    assert [measures[name] for name in ("median_budget", "max_budget", "pure_epsilon", "epsilon")] == [None] * 4


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_a_formal_run_says_what_it_guarantees_to_who_took_part_most_often(mechanism: str) -> None:
    config = run_config("synthetic", rounds=8, clipping="public", choice_epsilon=0.5, mechanism=mechanism)
    measures = finish(config).measures
    release = Release(Kind.TRAIN, 2, 5.0, Clipping.PUBLIC, mechanism=mechanism, hypotheses=2, choice_epsilon=0.5)
    assert measures["epsilon"] == guarantee({release: measures["max_participations"]}).epsilon
    if mechanism == "laplace":
        # 2 n / nu + choice-epsilon = 2 * 2/5 + 1/2 a participation.
        assert measures["pure_epsilon"] == pytest.approx(1.3 * measures["max_participations"])
    else:
        assert measures["pure_epsilon"] is None, "it has an epsilon at a delta alone"
        assert measures["max_budget"] is None, "the paper counts Laplace noise"


def test_clients_that_train_by_themselves_have_no_rounds() -> None:
    finished = finish(run_config("synthetic", strategy=LOCAL_ONLY))
    assert finished.state is None
    # Ten rows, of which five are for training, leave more than the irreducible .577.
    assert 0.577 < finished.measures["last"]["held_out"]["mean"] < 2


@pytest.mark.parametrize("how", [FINE_TUNE, INTERPOLATE])
def test_clients_that_make_a_hypothesis_their_own_start_from_what_the_run_found(how: str) -> None:
    config = run_config("synthetic", rounds=3, hypotheses=1)
    found, own = finish(config).state, finish({**config, "strategy": how})
    setup = Setup.parse(config)
    dataset = setup.open_dataset()
    assert found is not None
    assert dataset is not None
    assert own.state is None
    for state, hypotheses in (("last", found.hypotheses), ("best", found.best)):
        expected = personalised(setup.model, dataset, hypotheses, setup.config, Personal(how))
        assert own.measures.pop(state) == {"held_out": expected}
    assert not own.measures


class Talkative(Observer):
    """Has something for the report."""

    def section(self) -> Section:
        """Return it."""
        return Section("What I saw")


def test_what_observers_add_to_the_report_is_kept() -> None:
    config = run_config("synthetic", rounds=1, observers=f"{__name__}:Talkative")
    assert finish(config).sections == (Section("What I saw"),)


def test_a_refusing_node_is_a_failed_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setenv("UMBEL_MIN_NOISE_MULTIPLIER", "9")
    with pytest.raises(FleetError):
        finish(run_config("synthetic", rounds=1))


def test_without_a_dataset_there_is_nobody_to_measure_on() -> None:
    with raises(ConfigError, "config.no-dataset"):
        finish(run_config("synthetic", strategy=LOCAL_ONLY, dataset="", model="linear"))


# Client c has c % 3 + 1 rows, which all say c.
LENGTHS = [c % 3 + 1 for c in range(12)]
ROWS = np.repeat(np.arange(12, dtype=np.float32), LENGTHS)
MANIFEST = Manifest(
    name="twelve", clients=12, split={"train": 8, "validation": 4}, model="linear", groups=[c % 2 for c in range(12)]
)
TWELVE = Dataset(MANIFEST, np.stack([ROWS, ROWS], 1), ROWS, offsets_of(LENGTHS), [f"c{c}" for c in range(12)])


def clients(dataset: Dataset) -> list[int]:
    """Return which client is where, after a look at whether all of it came along."""
    found = []
    for i, name in enumerate(dataset.names):
        features, targets = dataset.client(i)
        (c,) = set(targets.tolist())
        found.append(int(c))
        assert (features == c).all()
        assert (len(targets), name, dataset.manifest.groups[i]) == (LENGTHS[int(c)], f"c{int(c)}", c % 2)
    return found


def test_clients_change_places_and_nothing_else() -> None:
    one, other = (shuffled(TWELVE, seed) for seed in (1, 2))
    assert sorted(clients(one)) == sorted(clients(other)) == list(range(12))
    assert set(clients(one)[:8]) != set(clients(other)[:8]), "others train"
    assert one.manifest.split == MANIFEST.split
    assert one.manifest.provenance == "Clients put in random order with seed 1."
    assert clients(shuffled(TWELVE, 1)) == clients(one)


def test_there_is_a_dataset_for_each_seed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_dataset(source, TWELVE.manifest, TWELVE.features, TWELVE.targets, TWELVE.offsets, TWELVE.names)
    written = dict(split_by_seed(str(source), tmp_path, [2000, 2001]))
    assert written == {seed: str(tmp_path / "data" / f"twelve-{seed}") for seed in (2000, 2001)}
    for seed, path in written.items():
        assert clients(open_dataset(Path(path))) == clients(shuffled(TWELVE, seed))
