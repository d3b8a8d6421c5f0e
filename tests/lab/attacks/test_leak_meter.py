"""The leak meter attacks a simulated client, and the run does not notice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from tests.helpers.grids import ListeningGrid
from umbel.client.app import app
from umbel.data import BUNDLED, Manifest, write_leaf
from umbel.privacy.gate import releases
from umbel.privacy.mechanisms import Gaussian, Laplace
from umbel.privacy.mechanisms.base import Mechanism
from umbel.protocol.errors import ConfigError
from umbel.protocol.records import to_array_record
from umbel.protocol.release import Clipping
from umbel.server.history import Round, State
from umbel.server.observer import Observer, Run
from umbel.server.observers import named
from umbel.server.rounds import run_rounds
from umbel.server.run_folder import RunFolder
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import play
from umbel_lab.attacks.leak_meter import Leak, LeakMeter, guessed_norm, section_of
from umbel_lab.attacks.pac_attack import direction_error, error_rate, local_parameters

from .conftest import Config, RelayGrid, prepared

pytestmark = pytest.mark.rest


def metered(every: int = 1) -> Config:
    """Return the entry of the run config that has a run carry the meter."""
    return {"observers": f"umbel_lab.attacks.leak_meter:LeakMeter every={every}"}


def meter_of(run: Run) -> LeakMeter:
    (meter,) = (one for one in run.observers if isinstance(one, LeakMeter))
    return meter


def leaks_of(config: Config, nodes: int = 1, policy: Mapping[str, Any] = {}) -> list[Leak]:
    """What a run with the meter finds."""
    places = [{"partition-id": i, "num-partitions": nodes} | dict(policy) for i in range(nodes)]
    return meter_of(play(config, node_configs=places, strict=not policy)).leaks


def rounds_of(state: State) -> list[Round]:
    """The rounds, without the time they took."""
    return [replace(entry, seconds=0.0, stages={}) for entry in state.history]


# --- the run


@pytest.mark.parametrize("strategy", ["group-privacy", "fedavg"])
@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_a_run_learns_the_same_with_and_without_it(run_config: Config, strategy: str, noise: float) -> None:
    config = run_config | {"rounds": 5, "restarts": 1, "strategy": strategy, "noise-multiplier": noise}
    plain, watched = play(config, strict=False), play(config | metered(2), strict=False)
    assert watched.state.hypotheses["weight"].tobytes() == plain.state.hypotheses["weight"].tobytes()
    assert watched.state.best["weight"].tobytes() == plain.state.best["weight"].tobytes()
    assert rounds_of(watched.state) == rounds_of(plain.state)
    np.testing.assert_array_equal(watched.strategy.fleet.participations, plain.strategy.fleet.participations)
    assert [leak.round for leak in meter_of(watched).leaks] == [1, 3, 5]


def test_one_client_is_attacked_the_same_for_a_seed_whatever_the_number_of_nodes(run_config: Config) -> None:
    config = run_config | {"rounds": 4, "restarts": 1} | metered()
    (first, norms), other = (
        ([(leak.round, leak.client, leak.choice) for leak in leaks], [leak.norm for leak in leaks])
        for leaks in (leaks_of(config, nodes) for nodes in (1, 7))
    )
    assert len({client for _, client, _ in first}) == 1
    assert other[0] == first
    np.testing.assert_allclose(other[1], norms, rtol=1e-5)
    one = config | {"rounds": 1, "clients-per-round": 1}
    assert len({leaks_of(one | {"seed": seed})[0].client for seed in range(8)}) > 3


def test_no_other_client_is_asked_and_the_messages_are_its_own(run_config: Config) -> None:
    config = run_config | {"rounds": 3, "restarts": 1, "strategy": "fedavg"}
    counts = []
    for changes in ({}, metered(2)):
        grid = ListeningGrid(app, config)
        run_rounds(prepared(config | changes, grid))
        counts.append({group: counter.total() for group, counter in grid.rounds.items()})
    plain, watched = counts
    assert watched == plain | {"1": plain["1"] + 2, "3": plain["3"] + 2}, "two messages in rounds 1 and 3"


def test_sites_with_data_of_their_own_are_not_attacked(run_config: Config) -> None:
    config = run_config | {"rounds": 2, "restarts": 1, "strategy": "fedavg"} | metered()
    for changes in ({}, {"dataset": "", "model": "linear"}):
        with raises(ConfigError, "config.simulation-only"):
            play(config | changes, node_configs=[{"data-path": str(BUNDLED / "synthetic.json")}])


@pytest.mark.parametrize("policy", [{"min-noise-multiplier": 2.0}, {"allow-unsanitised": False}], ids=str)
def test_a_client_that_does_not_say_the_truth_is_not_measured(run_config: Config, policy: Config) -> None:
    config = run_config | {"rounds": 3, "restarts": 1}
    places = [{"partition-id": 0, "num-partitions": 1} | policy]
    run = play(config | metered(), node_configs=places)
    assert meter_of(run).leaks == []
    assert meter_of(run).section() is None
    assert rounds_of(run.state) == rounds_of(play(config, node_configs=places).state)


@pytest.mark.parametrize("text", ["every=0", "every=often", "rounds=5"])
def test_what_it_cannot_be_asked_is_an_error(run_config: Config, text: str) -> None:
    with pytest.raises(ConfigError) as told:
        named(Setup.parse(run_config | {"observers": f"umbel_lab.attacks.leak_meter:LeakMeter {text}"}))
    assert "leak_meter:LeakMeter" in told.value.text
    assert text.partition("=")[0] in told.value.text


# --- what it leaves behind


def test_a_run_that_is_resumed_goes_on_with_what_was_found(run_config: Config, tmp_path: Path) -> None:
    config = run_config | {"restarts": 1, "strategy": "fedavg", "validate-every": 100} | metered(2)
    folder = RunFolder(tmp_path / "parts")
    whole, first = prepared(config | {"rounds": 7}), prepared(config | {"rounds": 5}, folder=folder)
    run_rounds(whole)
    run_rounds(first)
    # Killed in round 5: its attack was noted, and its training was not.
    del first.state.history[4:]
    second = prepared(config | {"rounds": 7}, folder=folder, state=replace(first.state, stopped=""))
    run_rounds(second)
    whole, again = meter_of(whole).leaks, meter_of(second).leaks
    assert [leak.round for leak in again] == [leak.round for leak in whole] == [1, 3, 5, 7]
    assert again[:2] == whole[:2]
    lines = (folder.path / "leaks.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [asdict(leak) for leak in again]


def test_leaks_are_told_on_average_and_without_what_the_model_does_not_have(run_config: Config) -> None:
    leaks = [Leak(1, 17, choice=True, norm=0.5, update=None), Leak(5, 17, choice=False, norm=0.25, update=0.125)]
    run = play(run_config | {"rounds": 2, "restarts": 1})
    section = section_of(leaks, 4, run)
    assert section is not None
    (text,) = section.paragraphs
    for part in ("4 rounds", "number 17", "guessed 0.5", "update 0.375", "one 0.125"):
        assert part in text
    assert "labels" not in text
    assert "has spent 2 of the paper's budget" in text, "2/5 a participation, in five rounds"
    assert ">paper's budget<" in section.picture
    assert "validation" not in section.picture, "its metric is its loss"
    assert section_of([Leak(1, 17), Leak(5, 17)], 4, run) is None, "nothing to measure"
    assert section_of([], 4, run) is None
    run = play(run_config | {"rounds": 1, "restarts": 1, "noise-multiplier": 0.0})
    unbounded = section_of([Leak(1, 17, predictions=0.96)], 1, run)
    assert unbounded is not None
    assert "0.96" in unbounded.paragraphs[0]
    assert "paper's budget" not in unbounded.paragraphs[0] + unbounded.picture


# --- what it finds out


def test_without_noise_an_update_is_read_as_it_is(run_config: Config) -> None:
    leaks = leaks_of(run_config | {"rounds": 6, "restarts": 1, "noise-multiplier": 0.0} | metered())
    assert len(leaks) == 6
    for leak in leaks:
        assert leak.choice is True
        assert leak.norm == pytest.approx(0, abs=1e-9)
        assert leak.update == pytest.approx(1)
        assert (leak.labels, leak.predictions) == (None, None), "a linear model has no classes and no local parameters"


def test_a_randomised_choice_is_told_from_the_clients_own(run_config: Config) -> None:
    """At choice-epsilon .01 the client trains one of the two as good as at random, and the meter sees only that."""
    config = run_config | {"rounds": 12, "restarts": 1, "noise-multiplier": 0.0, "choice-epsilon": 0.01} | metered()
    assert {leak.choice for leak in leaks_of(config)} == {True, False}


@pytest.mark.rest
def test_noise_hides_what_an_update_is_like(run_config: Config) -> None:
    """At nu = 1000 what is left of it over 60 rounds is chance, with a mean of 0.

    Cosines of uniform directions in the plane have variance 1/2. False-alarm rate 6e-7, five deviations.
    """
    config = run_config | {"strategy": "fedavg", "rounds": 60, "restarts": 1, "noise-multiplier": 1000.0}
    leaks = leaks_of(config | metered() | {"validate-every": 1000})
    assert {leak.choice for leak in leaks} == {None}, "of one hypothesis there is none"
    likeness = [leak.update for leak in leaks if leak.update is not None]
    assert len(likeness) == 60
    assert abs(np.mean(likeness)) < 5 * np.sqrt(1 / 2 / 60)


@pytest.mark.parametrize(
    ("mode", "noise"),
    [*((mode, Laplace(nu)) for mode in Clipping for nu in (0.5, 3.0)), (Clipping.UPDATE, Gaussian(3.0))],
)
def test_the_norm_of_an_update_is_guessed_by_the_length_of_what_is_released(mode: Clipping, noise: Mechanism) -> None:
    """In many dimensions noise is as long as it is on average: n = 250,000, so lengths stray by 1/500 or so.

    Five deviations of |change|^2, 2 nu^2 r^2 / sqrt(n), leave less than 8 % of a norm of r = 1 at nu = 3 in the mode
    that subtracts, .5 % where the noise goes by the norm itself, .7 % of Gaussian noise. False-alarm rate 1e-6.
    """
    n = 250_000
    radius = 1.0 if mode is Clipping.PUBLIC else 0.001
    (change,) = releases.sanitise(noise, np.eye(1, n), radius, mode, [np.random.default_rng(1)])
    assert guessed_norm(change, noise, mode, radius) == pytest.approx(1, abs=0.01 if mode is Clipping.UPDATE else 0.1)


@pytest.mark.parametrize("mode", Clipping)
def test_the_square_of_the_norm_is_guessed_right_on_average(mode: Clipping) -> None:
    """In few dimensions too (Lemma 4.3): n = 2, nu = .2, |delta| = 1 = r. False-alarm rate 6e-7, five deviations."""
    draws, n, nu = 10_000, 2, 0.2
    updates = np.zeros((draws, n))
    updates[:, 0] = 1.0
    generator = np.random.default_rng(2)
    changes = releases.sanitise(Laplace(nu), updates, 1.0, mode, [generator] * draws)
    squares = np.array([guessed_norm(change, Laplace(nu), mode, 1.0) ** 2 for change in changes])
    assert abs(squares.mean() - 1) < 5 * squares.std() / np.sqrt(draws)


def classes(path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Write a dataset of two clients that know three classes, unequally often; return what makes a run of it."""
    (path / "umbel_test_three.py").write_text("from torch import nn\ndef factory(): return nn.Linear(2, 3)\n")
    monkeypatch.syspath_prepend(path)
    features = (0.01 * np.random.default_rng(0).standard_normal((10, 2))).tolist()
    rows = (features, [0] * 1 + [1] * 3 + [2] * 6)
    manifest = Manifest(name="three", clients=2, split={"train": 2, "validation": 0})
    write_leaf(path / "three.json", manifest, {"a": rows, "b": rows})
    return {
        "dataset": str(path / "three.json"), "model": "umbel_test_three:factory", "loss": "cross-entropy",
        "strategy": "fedavg", "clients-per-round": 2, "rounds": 3, "restarts": 1, "batch-size": 0,
    }  # fmt: skip


def test_the_last_bias_gives_the_labels_away(
    run_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its change is alpha (frequency - softmax) a class, and a fresh model's softmax is about 1/3 everywhere."""
    config = run_config | classes(tmp_path, monkeypatch) | metered()
    for noise, low, high in ((0.0, 0.9, 1.0), (1e6, -1.0, 0.9)):
        leaks = leaks_of(config | {"noise-multiplier": noise})
        assert len(leaks) == 3
        labels = [leak.labels for leak in leaks if leak.labels is not None]
        assert len(labels) == 3
        assert low <= np.mean(labels) <= high + 1e-9


# --- a recommender


def recommending(config: Config, **changes: Any) -> Config:
    factors = {"strategy": "recommender", "dataset": "preferences", "noise-multiplier": 0.0, "restarts": 1}
    steps = {"local-epochs": 0, "local-steps": 1, "clients-per-round": 20, "clip-norm-floor": 1e-6}
    return config | factors | steps | metered() | changes


def test_of_a_recommender_the_predictions_are_stolen(run_config: Config) -> None:
    leaks = leaks_of(recommending(run_config, rounds=15))
    predictions = [leak.predictions for leak in leaks]
    assert [Leak(one.round, one.client, predictions=one.predictions, signed=one.signed) for one in leaks] == leaks
    assert all(share is not None and 0 <= share <= 1 for share in predictions)
    assert predictions[-1] is not None
    assert predictions[-1] > 0.9


class Comparing(Observer):
    """Compares the meter's estimate with what the client's node keeps, which no observer elsewhere can."""

    def __init__(self, meter: LeakMeter, grid: InProcessGrid) -> None:
        super().__init__()
        self._meter, self._grid = meter, grid
        self.shares: list[tuple[float, float]] = []

    def before_round(self, run: Run, number: int) -> None:
        client, roster = self._meter.client, run.fleet.roster(run.grid)
        own = local_parameters(self._grid, roster, np.array([client]))[client]["user"].astype(float)
        items = run.state.hypotheses["items"][0].astype(float)
        assert self._meter._estimate is not None
        vector = self._meter._estimate.vector
        self.shares.append((1 - direction_error(vector, own, items), 1 - error_rate(vector, own, items)))


def test_predictions_are_the_share_of_items_on_which_the_estimate_agrees_with_what_a_client_keeps(
    run_config: Config,
) -> None:
    """In process both can be seen; elsewhere what it says, from items of zeros and without noise, has to do."""
    config = recommending(run_config, rounds=8, **{"noise-multiplier": 3.0})
    found = []
    for relayed in (False, True):
        grid = InProcessGrid(app, config)
        run = prepared(config, RelayGrid(grid) if relayed else grid)
        meter = meter_of(run)
        comparing = Comparing(meter, grid)
        run.observers = (meter, comparing)
        run_rounds(run)
        found.append([(leak.predictions, leak.signed) for leak in meter.leaks])
        assert found[-1] == comparing.shares
    assert found[0] == found[1]
    assert len(found[0]) == 8


def test_of_a_recommender_with_biases_the_sign_is_stolen_too(run_config: Config) -> None:
    config = recommending(run_config, rounds=15, model="biased-factors", **{"local-steps": 0, "local-epochs": 1})
    leaks = leaks_of(config)
    assert all(leak.signed is not None and 0 <= leak.signed <= 1 for leak in leaks)
    late = leaks[8:]
    assert np.mean([leak.signed for leak in late if leak.signed is not None]) > 0.8
    assert sum(leak.signed == leak.predictions for leak in late) >= 6


def test_noise_hides_the_predictions(run_config: Config) -> None:
    """At nu = 1000 the stolen vector is a guess; under its sign it agrees with the true one on half of the items."""
    config = recommending(run_config, rounds=1, **{"noise-multiplier": 1000.0})
    leaks = [leaks_of(config | {"seed": seed})[0] for seed in range(10)]
    assert all(leak.predictions is not None and leak.predictions >= 0.5 for leak in leaks)
    shares = [leak.signed for leak in leaks]
    assert 0.2 < np.mean([share for share in shares if share is not None]) < 0.8


def test_clients_that_do_not_say_the_truth_of_their_vectors_are_not_measured(run_config: Config) -> None:
    config = recommending(run_config, rounds=2, **{"noise-multiplier": 2.0})
    run = play(config, node_configs=[{"partition-id": 0, "num-partitions": 1, "allow-unsanitised": False}])
    assert meter_of(run).leaks == []
    assert all(entry.releases == 20 for entry in run.state.history if entry.asked)


def test_a_client_that_is_asked_for_the_truth_of_its_vector_keeps_it(run_config: Config) -> None:
    """From items of zeros nothing moves: it is trained once for the release, as in any round, and no further."""
    config = recommending(run_config, rounds=1)
    kept, client = [], np.array([27])  # drawn by seed 0
    for metering in (True, False):
        run = prepared(config)
        fleet, grid = run.fleet, run.grid
        if metering:
            meter_of(run).begin(run)
            meter_of(run).before_round(run, 1)
            assert meter_of(run).client == client
        else:
            arrays, task = to_array_record(run.state.hypotheses), run.strategy.task(1, run.setup.task())
            grid.send_and_receive(fleet.ask_training(1, arrays, task, grid, client))
        kept.append(local_parameters(grid, fleet.roster(grid), client)[27]["user"])
    np.testing.assert_array_equal(*kept)


def test_a_recommender_of_several_hypotheses_is_measured_like_any_model(run_config: Config) -> None:
    config = recommending(run_config, rounds=1) | {"strategy": "group-privacy", "hypotheses": 2}
    (leak,) = leaks_of(config)
    assert leak.predictions is None
    assert leak.choice is not None
