"""A run of an experiment is a run of the app."""

from __future__ import annotations

import numpy as np
import pytest

import client.app
from experiments.runs import LOCAL_ONLY, play, run_config
from server.rounds import State, initial_hypotheses, run_rounds
from server.settings import Settings
from simulation.grid import InProcessGrid


def test_a_run_config_is_the_apps_with_the_experiments_over_it() -> None:
    config = run_config("hospital", noise_multiplier=1.0)
    assert config["federation"] == "hospital"
    assert config["noise-multiplier"] == 1.0
    assert config["device"] == "auto"


def test_a_key_that_the_app_does_not_have_is_refused() -> None:
    with pytest.raises(KeyError, match="noise-multiplayer"):
        run_config("hospital", noise_multiplayer=1.0)


def test_a_run_gives_what_the_apps_own_rounds_give() -> None:
    config = run_config("synthetic", rounds=5, seed=4)
    settings = Settings.parse(config)
    grid = InProcessGrid(client.app.app, config, nodes=3)
    start = initial_hypotheses(settings, grid)
    state = State(start, start)
    run_rounds(settings, grid, state, lambda _: None)

    played = play(config)
    assert played.state is not None
    assert played.participations is not None
    np.testing.assert_array_equal(played.state.best["weight"], state.best["weight"])
    np.testing.assert_array_equal(played.state.hypotheses["weight"], state.hypotheses["weight"])
    np.testing.assert_array_equal(played.participations, settings.strategy.participations)
    assert played.measures["best_loss"] == state.best_loss
    # n/nu = 2/5 a participation.
    assert played.measures["max_budget"] == pytest.approx(0.4 * played.participations.max())
    assert played.measures["median_budget"] == pytest.approx(0.4 * np.median(played.participations))
    assert played.measures["rounds"] == 5


def test_the_trace_holds_each_rounds_releases() -> None:
    played = play(run_config("synthetic", rounds=3))
    assert [outcome.round for outcome in played.trace] == [1, 2, 3]
    for outcome in played.trace:
        assert outcome.releases is not None
        assert outcome.releases.shape == (7, 2)
        assert len(outcome.clients) == len(outcome.groups) == 7


def test_nothing_bounds_what_unsanitised_releases_cost() -> None:
    measures = play(run_config("synthetic", rounds=1, strategy="fedavg", noise_multiplier=0.0)).measures
    assert measures["median_budget"] is None
    assert measures["max_budget"] is None


def test_clients_that_train_by_themselves_have_no_rounds() -> None:
    played = play(run_config("synthetic", strategy=LOCAL_ONLY))
    assert played.state is None
    # Ten rows, of which five are for training, leave more than the irreducible .577.
    assert 0.577 < played.measures["held_out"]["mean"] < 2


def test_a_refusing_node_is_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_LEAST_NOISE_MULTIPLIER", "9")
    with pytest.raises(RuntimeError, match="refused in round 1"):
        play(run_config("synthetic", rounds=1))
