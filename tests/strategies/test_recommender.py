"""A recommender's server adds up what clients changed, and in simulation may ask for their local models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import models
from client.app import app
from client.personal import LocalModels
from protocol.errors import ConfigError
from server.rounds import State, initial_hypotheses, run_rounds
from server.settings import Settings
from simulation.grid import InProcessGrid
from strategies.options import Options
from strategies.recommender import Recommender, local_models

Config = dict[str, Any]


@pytest.fixture
def factors_config(run_config: Config) -> Config:
    """Steps of Protocol 1 on the preferences that come with the app."""
    return run_config | {
        "strategy": "recommender", "federation": "preferences", "noise-multiplier": 0.0, "restarts": 1,
        "local-epochs": 0, "local-steps": 1, "clients-per-round": 20, "radius-floor": 1e-6,
    }  # fmt: skip


def play(config: Config, nodes: int = 1) -> tuple[State, InProcessGrid, Settings]:
    """Run the rounds."""
    settings, grid = Settings.parse(config), InProcessGrid(app, config, nodes)
    start = initial_hypotheses(settings, grid)
    state = State(hypotheses=start, best=start)
    run_rounds(settings, grid, state, lambda _: None)
    return state, grid, settings


def test_changes_are_added_up() -> None:
    """Two clients moved the first number, one the second, none the third."""
    moved = Recommender().combine(np.array([[2.0, 2, 3], [1.5, 4, 3]]), np.array([1.0, 2, 3]))
    assert moved.tolist() == [2.5, 4, 3]


def test_there_is_one_set_of_items() -> None:
    assert Recommender(hypotheses=5).hypotheses == 1


def test_a_model_without_a_local_part_is_refused() -> None:
    options = Options({"strategy": "recommender"})
    Recommender().prepare(options, models.load("factors-3x2"))
    with pytest.raises(ConfigError, match="strategy 'recommender' is for factor models, not 'mlp'; name a federation"):
        Recommender().prepare(options, models.load("mlp"))


def test_items_are_learnt_that_tell_newcomers_what_they_like(factors_config: Config) -> None:
    state, _, _ = play(factors_config | {"rounds": 60})
    losses = [entry.loss for entry in state.history if entry.loss is not None]
    assert np.mean(losses[20:]) < losses[0] - 0.03
    assert state.history[0].releases == 20


def test_rounds_do_not_depend_on_the_number_of_nodes(factors_config: Config) -> None:
    found = [play(factors_config | {"rounds": 4}, nodes)[0].hypotheses["items"] for nodes in (1, 2, 7)]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("nodes", [1, 7])
def test_simulated_clients_tell_their_local_models(factors_config: Config, nodes: int) -> None:
    _, grid, settings = play(factors_config | {"rounds": 2}, nodes)
    clients = np.array([0, 8, 13, 59])
    told = local_models(grid, settings.strategy.roster(grid), clients)
    assert sorted(told) == clients.tolist()
    contexts = list(grid.contexts.values())
    for client, model in told.items():
        (kept,) = LocalModels(contexts[client % nodes].state, 8, settings.seed).read([client])
        np.testing.assert_array_equal(model, kept)


def test_nodes_that_refuse_are_left_out(factors_config: Config) -> None:
    nodes = [{"partition-id": i, "num-partitions": 2, "allow-unsanitised": i == 0} for i in range(2)]
    grid = InProcessGrid(app, factors_config, node_configs=nodes)
    strategy = Settings.parse(factors_config).strategy
    assert sorted(local_models(grid, strategy.roster(grid), np.array([0, 1, 2, 3]))) == [0, 2]
