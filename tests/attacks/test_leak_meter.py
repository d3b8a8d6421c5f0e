"""The leak meter attacks a simulated client that consents, and the run does not notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attacks.leak_meter import Leak, LeakMeter
from attacks.pac_attack import Theft, error_rate
from client.app import app
from client.personal import LocalModels
from federation import BUNDLED, Manifest, write_leaf
from privacy.laplace import sanitise
from server.rounds import Round, State, initial_hypotheses, run_rounds
from server.settings import Settings
from simulation.grid import InProcessGrid

Config = dict[str, Any]


def play(config: Config, nodes: int = 1, **policy: Any) -> tuple[State, Settings, InProcessGrid]:
    """Run the rounds."""
    settings = Settings.parse(config)
    places = [{"partition-id": i, "num-partitions": nodes} | policy for i in range(nodes)]
    grid = InProcessGrid(app, config, node_configs=places)
    start = initial_hypotheses(settings, grid)
    state = State(hypotheses=start, best=start)
    run_rounds(settings, grid, state, lambda _: None)
    return state, settings, grid


def rounds_of(state: State) -> list[Round]:
    """The rounds, without the time they took."""
    return [replace(entry, seconds=0.0) for entry in state.history]


def meter(config: Config, **changes: Any) -> LeakMeter:
    """Return the leak meter of a run."""
    found = Settings.parse(config | {"leak-meter": 1} | changes).leak_meter
    assert found is not None
    return found


# --- the run


@pytest.mark.parametrize("strategy", ["group-privacy", "fedavg", "ifca"])
@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_a_run_learns_the_same_with_and_without_it(run_config: Config, strategy: str, noise: float) -> None:
    config = run_config | {"rounds": 5, "restarts": 1, "strategy": strategy, "noise-multiplier": noise}
    plain, settings, _ = play(config)
    metered, watched, _ = play(config | {"leak-meter": 2})
    assert metered.hypotheses["weight"].tobytes() == plain.hypotheses["weight"].tobytes()
    assert metered.best["weight"].tobytes() == plain.best["weight"].tobytes()
    assert rounds_of(metered) == rounds_of(plain)
    np.testing.assert_array_equal(watched.strategy.participations, settings.strategy.participations)
    assert plain.leaks == []
    assert [leak.round for leak in metered.leaks] == [1, 3, 5]


def test_one_client_is_attacked_the_same_for_a_seed_whatever_the_number_of_nodes(run_config: Config) -> None:
    config = run_config | {"rounds": 4, "restarts": 1, "leak-meter": 1}
    first, *others = (play(config, nodes)[0].leaks for nodes in (1, 2, 7))
    assert len({leak.client for leak in first}) == 1
    for leaks in others:
        assert [(leak.round, leak.client, leak.choice) for leak in leaks] == [
            (leak.round, leak.client, leak.choice) for leak in first
        ]
        np.testing.assert_allclose([leak.norm for leak in leaks], [leak.norm for leak in first], rtol=1e-5)
    assert len({meter(run_config, seed=seed).client for seed in range(20)}) > 5


def test_sites_with_data_of_their_own_are_not_attacked(run_config: Config) -> None:
    config = run_config | {"rounds": 2, "restarts": 1, "strategy": "fedavg", "leak-meter": 1}
    grid = InProcessGrid(app, config, node_configs=[{"data-path": str(BUNDLED / "synthetic.json")}])
    settings = Settings.parse(config)
    start = initial_hypotheses(settings, grid)
    with pytest.raises(ValueError, match="leak-meter is for simulation; at sites with data of their own set it to 0"):
        run_rounds(settings, grid, State(hypotheses=start, best=start), lambda _: None)


@pytest.mark.parametrize("policy", [{"least-noise-multiplier": 2.0}, {"allow-unsanitised": False}], ids=str)
def test_a_client_that_does_not_tell_the_truth_is_not_measured(run_config: Config, policy: Config) -> None:
    config = run_config | {"rounds": 3, "restarts": 1}
    state, _, _ = play(config | {"leak-meter": 1}, **policy)
    assert state.leaks == []
    assert rounds_of(state) == rounds_of(play(config, **policy)[0])


# --- what it finds out


def test_without_noise_an_update_is_read_as_it_is(run_config: Config) -> None:
    state, _, _ = play(run_config | {"rounds": 6, "restarts": 1, "noise-multiplier": 0.0, "leak-meter": 1})
    assert len(state.leaks) == 6
    for leak in state.leaks:
        assert leak.choice is True
        assert leak.norm == pytest.approx(0, abs=1e-9)
        assert leak.update == pytest.approx(1)
        assert (leak.labels, leak.predictions) == (None, None), "a linear model has no classes and no local part"


def test_of_one_hypothesis_there_is_no_choice_to_guess(run_config: Config) -> None:
    state, _, _ = play(run_config | {"rounds": 1, "restarts": 1, "strategy": "fedavg", "leak-meter": 1})
    (leak,) = state.leaks
    assert leak.choice is None
    assert leak.norm is not None


def test_noise_hides_what_an_update_is_like(run_config: Config) -> None:
    """At nu = 1000 what is left of it over 60 seeds is chance, with a mean of 0.

    Cosines of uniform directions in the plane have variance 1/2. False-alarm rate 6e-7, five deviations.
    """
    config = run_config | {"strategy": "fedavg", "rounds": 1, "restarts": 1, "noise-multiplier": 1000.0}
    leaks = [play(config | {"leak-meter": 1, "seed": seed})[0].leaks[0] for seed in range(60)]
    likeness = [leak.update for leak in leaks if leak.update is not None]
    assert len(likeness) == 60
    assert abs(np.mean(likeness)) < 5 * np.sqrt(1 / 2 / 60)


@pytest.mark.parametrize("nu", [0.5, 3.0])
@pytest.mark.parametrize("mode", ["update", "public"])
def test_the_norm_of_an_update_is_guessed_by_the_length_of_what_is_released(
    run_config: Config, mode: str, nu: float
) -> None:
    """In many dimensions noise is as long as it is on average: n = 250,000, so lengths stray by 1/500 or so.

    Five deviations of |change|^2, 2 nu^2 r^2 / sqrt(n), leave less than 8 % of a norm of r = 1 at nu = 3 in the mode
    that subtracts, .5 % where the noise goes by the norm itself. False-alarm rate 1e-6.
    """
    n = 250_000
    update = np.zeros((1, n))
    update[0, :4] = 0.5
    changes = {"radius": mode, "radius-start": 1.0, "noise-multiplier": nu, "radius-floor": 0.001}
    (change,) = sanitise(update, nu, 1.0 if mode == "public" else 0.001, mode, [np.random.default_rng(1)])
    guess = meter(run_config, **changes)._guess_norm(change, 1)
    assert guess == pytest.approx(1, abs=0.01 if mode == "update" else 0.1)


@pytest.mark.parametrize("mode", ["update", "public"])
def test_the_square_of_the_norm_is_guessed_right_on_average(run_config: Config, mode: str) -> None:
    """In few dimensions too (Lemma 4.3): n = 2, nu = .2, |delta| = 1 = r. False-alarm rate 6e-7, five deviations."""
    draws, n, nu = 40_000, 2, 0.2
    updates = np.zeros((draws, n))
    updates[:, 0] = 1.0
    generator = np.random.default_rng(2)
    changes = sanitise(updates, nu, 1.0, mode, [generator] * draws)
    found = meter(run_config, **{"radius": mode, "radius-start": 1.0, "noise-multiplier": nu})
    squares = np.array([found._guess_norm(change, 1) ** 2 for change in changes])
    assert abs(squares.mean() - 1) < 5 * squares.std() / np.sqrt(draws)


def classes(path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Write a federation of two clients that know three classes, unequally often; return what makes a run of it."""
    (path / "umbel_test_three.py").write_text("from torch import nn\ndef factory(): return nn.Linear(2, 3)\n")
    monkeypatch.syspath_prepend(path)
    features = (0.01 * np.random.default_rng(0).standard_normal((10, 2))).tolist()
    rows = (features, [0] * 1 + [1] * 3 + [2] * 6)
    manifest = Manifest("three", 2, {"train": 2, "validation": 0})
    write_leaf(path / "three.json", manifest, {"a": rows, "b": rows})
    return {
        "federation": str(path / "three.json"), "model": "umbel_test_three:factory", "loss": "cross-entropy",
        "strategy": "fedavg", "clients-per-round": 2, "rounds": 3, "restarts": 1, "batch-size": 0,
    }  # fmt: skip


def test_the_last_bias_gives_the_labels_away(
    run_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its change is alpha (frequency - softmax) a class, and a fresh model's softmax is about 1/3 everywhere."""
    config = run_config | classes(tmp_path, monkeypatch) | {"leak-meter": 1}
    for noise, least, most in ((0.0, 0.9, 1.0), (1e6, -1.0, 0.9)):
        leaks = play(config | {"noise-multiplier": noise})[0].leaks
        assert len(leaks) == 3
        labels = [leak.labels for leak in leaks if leak.labels is not None]
        assert len(labels) == 3
        assert least <= np.mean(labels) <= most + 1e-9


# --- a recommender


def recommending(config: Config, **changes: Any) -> Config:
    factors = {"strategy": "recommender", "federation": "preferences", "noise-multiplier": 0.0, "restarts": 1}
    steps = {"local-epochs": 0, "local-steps": 1, "clients-per-round": 20, "radius-floor": 1e-6, "leak-meter": 1}
    return config | factors | steps | changes


def test_of_a_recommender_the_predictions_are_stolen(run_config: Config) -> None:
    leaks = play(recommending(run_config, rounds=15))[0].leaks
    predictions = [leak.predictions for leak in leaks]
    assert [Leak(leak.round, leak.client, predictions=leak.predictions) for leak in leaks] == leaks, "and nothing else"
    assert all(share is not None and 0 <= share <= 1 for share in predictions)
    assert predictions[-1] is not None
    assert predictions[-1] > 0.9


def test_predictions_are_the_share_of_items_on_which_both_models_agree(run_config: Config) -> None:
    """The attack of one round done again by hand, from what the client's node keeps before and after."""
    config = recommending(run_config, rounds=1)
    settings, grid = Settings.parse(config), InProcessGrid(app, config)
    assert settings.leak_meter is not None
    hypotheses = initial_hypotheses(settings, grid)
    client, items = settings.leak_meter.client, hypotheses["items"][0].astype(float)
    (before,) = LocalModels(grid.contexts[100].state, 8, settings.seed).read([client])
    leak = settings.leak_meter.look(1, hypotheses, grid)
    (after,) = LocalModels(grid.contexts[100].state, 8, settings.seed).read([client])
    assert leak is not None
    # A single minibatch moves every item along the local model as it was, most of them against it.
    theft = Theft(8, spectral=True)
    theft.add(-before[None].astype(float))
    assert leak.predictions == pytest.approx(1 - error_rate(theft.local_model, after.astype(float), items), abs=0.011)


def test_noise_hides_the_predictions(run_config: Config) -> None:
    """At nu = 1000 the stolen model is a guess; over ten seeds it agrees with the true one on half of the items."""
    config = recommending(run_config, rounds=1, **{"noise-multiplier": 1000.0})
    shares = [play(config | {"seed": seed})[0].leaks[0].predictions for seed in range(10)]
    assert 0.2 < np.mean([share for share in shares if share is not None]) < 0.8


def test_clients_that_do_not_tell_their_local_models_are_not_measured(run_config: Config) -> None:
    config = recommending(run_config, rounds=2, **{"noise-multiplier": 2.0})
    state, _, _ = play(config, **{"allow-unsanitised": False})
    assert state.leaks == []
    assert all(entry.releases == 20 for entry in state.history if entry.asked)
