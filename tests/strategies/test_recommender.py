"""A recommender's server adds up what clients changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from tests.helpers.scripted import on, sends
from umbel import models
from umbel.nodes.fleet import Fleet
from umbel.protocol.errors import ConfigError
from umbel.protocol.releases import Releases
from umbel.protocol.run_config import RunConfig
from umbel.server.setup import Setup
from umbel.simulation.in_process import play
from umbel.strategies.base import HypothesisStrategy
from umbel.strategies.recommender import Recommender

Config = dict[str, Any]


@pytest.fixture
def factors_config(run_config: Config) -> Config:
    """Steps of Protocol 1 on the preferences that come with the app."""
    return run_config | {
        "strategy": "recommender", "dataset": "preferences", "noise-multiplier": 0.0, "restarts": 1,
        "local-epochs": 0, "local-steps": 1, "clients-per-round": 20, "clipping": "update floor=1e-6",
    }  # fmt: skip


def test_a_round_adds_up_the_changes_without_a_copy_of_them() -> None:
    items, random = np.array([[1.0, -2, 3, 0.1]], np.float32), np.random.default_rng(0)
    changes = random.normal(size=(50, 4)).astype(np.float32) * [1, 1e-3, 0, 0]  # nobody changed the last two
    strategy = on(Fleet(), Recommender())
    sends(strategy, {"items": items})
    releases = (items + changes).astype(np.float32)
    outcome = strategy.learn(1, Releases(releases, np.arange(50), None, 50, 0))
    assert type(strategy).combine is HypothesisStrategy.combine, "which sees a copy"
    assert outcome.following is not None
    found = outcome.following["items"]
    np.testing.assert_allclose(found, items + (releases.astype(float) - items).sum(axis=0), rtol=1e-6)
    assert found[0, 2:].tolist() == items[0, 2:].tolist(), "bit for bit"


def test_a_model_without_local_parameters_is_refused(run_config: Config) -> None:
    with raises(ConfigError, "config.strategy-model"):
        Setup.parse(run_config | {"strategy": "recommender"})


def test_items_are_learnt_that_tell_newcomers_what_they_like(factors_config: Config) -> None:
    state = play(factors_config | {"rounds": 40}).state
    losses = [entry.loss for entry in state.history if entry.loss is not None]
    assert np.mean(losses[20:]) < losses[0] - 0.03
    assert state.history[1].releases == 20


def test_items_with_a_prior_decay_by_the_share_of_the_clients_that_took_part() -> None:
    """Step .1, 2 of 8 clients: vectors lose .1 * 5 / 4 of themselves, biases .1 * 1 / 4."""
    strategy = on(Fleet(), Recommender())
    strategy.check(RunConfig(strategy="recommender", step_size=0.1), models.load("biased-factors items=2 size=1"))
    strategy.nodes.participations = np.zeros(8, np.int64)
    items = np.array([8.0, 4, 0, -8])
    moved = strategy.combine(np.stack([items, items + np.eye(4)[0]]), items, 0)
    np.testing.assert_allclose(moved, [8 * 0.875 + 1, 4 * 0.975, 0, -8 * 0.975])


@pytest.mark.rest
def test_with_biases_newcomers_are_told_better_what_they_like(factors_config: Config) -> None:
    """What everybody dislikes most of is what a bias is for."""
    epochs = {"local-steps": 0, "local-epochs": 1, "rounds": 40, "validation": "every=39"}
    plain, biased = (
        play(factors_config | epochs | {"model": model}).state.history[-1] for model in ("", "biased-factors")
    )
    assert biased.loss is not None
    assert plain.loss is not None
    assert biased.metric is not None
    assert biased.loss < plain.loss
    assert biased.metric > 0.8
