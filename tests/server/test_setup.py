"""A run config is checked before any work starts, and an error names the key."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from umbel import strategies
from umbel.data import Manifest, write_dataset, write_leaf
from umbel.privacy.accounting.guarantee import guarantee
from umbel.protocol.errors import ConfigError, DatasetError, ModelError
from umbel.protocol.release import Clipping, Kind, Release, RowPrivacy
from umbel.protocol.run_config import ClipSchedule, RunConfig
from umbel.protocol.tasks import TrainingSpec
from umbel.server.callbacks import named
from umbel.server.setup import Setup
from umbel.strategies import Callback, FedAvg, GroupPrivacy

FACTORS = {"strategy": "recommender", "dataset": "preferences", "noise-multiplier": 0.0}


# --- what is accepted


def test_the_defaults_run_algorithm_1_on_the_papers_synthetic_data() -> None:
    setup = Setup.parse({})
    strategy, config = setup.strategy, setup.config
    assert type(strategy) is GroupPrivacy
    assert (strategy.hypotheses, strategy.min_releases, config.clients_per_round) == (2, 1, 20)
    assert (config.rounds, config.restarts, config.max_participations) == (100, 5, 2)
    assert config.clipping == ClipSchedule(Clipping.PUBLIC, floor=0.01, norm=2.0, decay=0.85)
    assert (setup.model.name, setup.model.loss.name) == ("linear", "mse")
    assert setup.manifest is not None
    assert setup.manifest.name == "synthetic"
    assert named(setup) == ()
    assert setup.release == Release(Kind.TRAIN, 2, 2.0, Clipping.PUBLIC, hypotheses=2, choice_epsilon=2.0)
    assert setup.task("mine") == TrainingSpec(run="mine", clip_norm=2.0)
    assert (setup.task().local_epochs, setup.task().clipping) == (10, Clipping.PUBLIC)


def test_each_value_goes_where_it_belongs(run_config: dict[str, Any]) -> None:
    # Values that tell the keys apart.
    run_config |= {"hypotheses": 3, "clients-per-round": 11, "min-releases": 4, "local-epochs": 20, "step-size": 0.21}
    run_config |= {"batch-size": 22, "noise-multiplier": 23.0, "local-steps": 27, "mechanism": "gaussian"}
    run_config |= {"choice-epsilon": 0.29, "clipping": "public norm=25.0 decay=0.26 floor=0.24"}
    setup = Setup.parse(run_config)
    strategy = setup.strategy
    assert (strategy.hypotheses, strategy.min_releases, setup.fleet.run.clients_per_round) == (3, 4, 11)
    assert setup.fleet.run is setup.config
    assert setup.config.clipping == ClipSchedule(Clipping.PUBLIC, floor=0.24, norm=25.0, decay=0.26)
    assert setup.release == Release(
        Kind.TRAIN, 2, 23.0, Clipping.PUBLIC, mechanism="gaussian", hypotheses=3, choice_epsilon=0.29
    )
    assert setup.task() == TrainingSpec(
        local_epochs=20, local_steps=27, step_size=0.21, batch_size=22, noise_multiplier=23.0, mechanism="gaussian",
        choice_epsilon=0.29, clipping=Clipping.PUBLIC, clip_norm=25.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fewest", "most"),
    [
        ({"strategy": "umbel_lab.strategies:ClusteredFL", "hypotheses": 10}, 2, 10),
        ({"hypotheses": "auto", "clients-per-round": 50}, 2, 8),
        ({"strategy": "umbel_lab.strategies:RDPCFL", "hypotheses": 10}, 10, 10),
        ({"hypotheses": 10}, 10, 10),
        ({"hypotheses": 10, "strategy": "group-privacy respawn=3"}, 10, 10),
    ],
    ids=str,
)
def test_a_random_choice_is_priced_among_the_fewest_hypotheses_and_an_open_one_among_the_most(
    run_config: dict[str, Any], changes: dict[str, Any], fewest: int, most: int
) -> None:
    """A client that chose among two of at most ten, as often as it took part, has spent more than among ten."""
    values = run_config | {"clipping": "public", "mechanism": "gaussian", "noise-multiplier": 20.0} | changes
    release = Setup.parse(values | {"choice-epsilon": 2.5}).release
    assert release.hypotheses == fewest
    costs = [guarantee({replace(release, hypotheses=k): 20}) for k in range(fewest, most + 1)]
    assert all(a is not None and b is not None and a.epsilon > b.epsilon for a, b in pairwise(costs))
    assert Setup.parse(values | {"choice-epsilon": 0.0}).release.hypotheses == most


@pytest.mark.parametrize("changes", [{"hypotheses": 1}, {"strategy": "fedavg"}], ids=str)
def test_of_one_hypothesis_there_is_no_choice_to_pay_for(run_config: dict[str, Any], changes: dict[str, Any]) -> None:
    release = Setup.parse(run_config | changes | {"choice-epsilon": 1.0}).release
    assert (release.hypotheses, release.choice_epsilon, release.chooses) == (1, 0.0, False)


ROWS = {
    "protect": "rows", "noise-multiplier": 0.0, "rows": "clip=1 noise=1 rate=0.1 batch=5",
    "local-epochs": 2,
}  # fmt: skip


def test_noise_in_training_alone_is_for_single_releases_and_sums_have_noise_too(run_config: dict[str, Any]) -> None:
    setup = Setup.parse(run_config | ROWS)
    assert setup.task().row_privacy == RowPrivacy(1.0, 1.0, 0.1, 5.0, 20)
    assert (setup.release.noise_multiplier, setup.release.row_steps) == (0.0, 20)
    for strategy, mechanism in (("site-average", "gaussian"), ("secure-average", "discrete-gaussian")):
        sums = run_config | ROWS | {"strategy": strategy, "mechanism": mechanism, "clipping": "public"}
        with raises(ConfigError, "config.rows", "both"):
            Setup.parse(sums)
        both = Setup.parse(sums | {"protect": "both", "noise-multiplier": 3.0, "hypotheses": 1})
        assert both.release.by_rows
        assert both.release.noise_multiplier == 3


def test_parameters_are_frozen_or_local_as_the_run_says_or_else_the_data(
    run_config: dict[str, Any], umbel_home: Path
) -> None:
    manifest = Manifest(name="mine", clients=1, split={"train": 1, "validation": 0}, model="mlp", local="*.bias")
    write_dataset(umbel_home / "data" / "mine", manifest, np.zeros((1, 3)), np.zeros(1), np.array([0, 1]))
    own = Setup.parse(run_config | {"dataset": "mine"})
    assert own.model.local_shapes
    assert all(name.endswith(".bias") for name in own.model.local_shapes)
    assert own.task().frozen_digest == ""
    first = next(iter(own.model.shapes))
    asked = Setup.parse(run_config | {"dataset": "mine", "frozen": first})
    assert first not in asked.model.shapes
    assert asked.release.n == asked.model.num_parameters < own.release.n
    assert asked.task().frozen_digest == asked.model.frozen_digest != ""
    with raises(ModelError, "model.no-match", "nothing", "mlp"):
        Setup.parse(run_config | {"dataset": "mine", "frozen": "nothing"})


def test_callbacks_are_those_of_the_run_and_a_strategy_that_watches_itself(
    run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watching(FedAvg, Callback):
        """Both at once."""

    monkeypatch.setitem(strategies.STRATEGIES, "watching", "Watching")
    monkeypatch.setattr(strategies, "Watching", Watching, raising=False)
    setup = Setup.parse(run_config | {"strategy": "watching", "observers": "umbel:Callback"})
    assert [type(callback) for callback in named(setup)] == [Callback, Watching]
    assert named(setup)[-1] is setup.strategy


@pytest.mark.parametrize(
    ("accepted", "refused", "parts"),
    [
        (FACTORS | {"message-noise": 0.5}, {"message-noise": 0.5}, ("config.message-noise", "linear", "local")),
        *(
            ({"noise-per": unit}, {"noise-per": unit, "clipping": "public"}, ("config.conflict", "noise-per", unit))
            for unit in ("layer", "row")  # by themselves only where the clip norm is the update's own
        ),
    ],
)
def test_noise_of_another_kind_is_for_some_runs_alone(
    run_config: dict[str, Any], accepted: dict[str, Any], refused: dict[str, Any], parts: tuple[str, ...]
) -> None:
    task = Setup.parse(run_config | accepted).task()
    given = {"message-noise": task.message_noise, "noise-per": task.noise_per}
    assert all(accepted.get(name, value) == value for name, value in given.items())
    with raises(ConfigError, *parts):
        Setup.parse(run_config | refused)


def test_the_server_knows_which_metrics_are_shares(run_config: dict[str, Any]) -> None:
    """What a node reports is held to 0 to 1 where it is one."""
    assert not Setup.parse(run_config).fleet.metric_is_share, "RMSE"
    assert Setup.parse(run_config | {"dataset": "", "model": "cnn"}).fleet.metric_is_share


# --- what is refused


def test_data_that_cannot_be_used_are_an_error_at_once(run_config: dict[str, Any], umbel_home: Path) -> None:
    """A simulation should not start its nodes first."""
    path = umbel_home / "data" / "mine.json"
    manifest = Manifest(name="mine", clients=1, split={"train": 1, "validation": 0})
    write_leaf(path, manifest, {"a": ([[1.5, 2.0]], [0.5])})
    with raises(ModelError, "model.none", "model"):
        Setup.parse(run_config | {"dataset": str(path)})
    assert Setup.parse(run_config | {"dataset": str(path), "model": "linear"}).model.name == "linear"
    path.write_text(path.read_text().replace("1.5", "NaN"))
    with raises(DatasetError, "data.not-finite", "client 0", "row 0"):
        Setup.parse(run_config | {"dataset": str(path)})
    (umbel_home / "data" / "empty").mkdir()
    with raises(DatasetError, "data.no-file", "manifest.json"):
        Setup.parse(run_config | {"dataset": "empty"})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mechanism": "gausian", "clipping": "public"}, (ConfigError, "config.unknown-name", "gausian", "mechanism")),
        ({"strategy": "group-privacy x=1"}, (ConfigError, "config.unknown-option", "strategy", "respawn")),
        ({"observers": "mlflo"}, (ConfigError, "config.unknown-name", "mlflo", "tensorboard")),
        ({"model": "resnet"}, (ModelError, "model.unknown", "resnet", "linear")),
        ({"optimizer": "sgd momentun=0.9"}, (ConfigError, "config.unknown-option", "momentun", "momentum")),
        ({"dataset": "lilies"}, (DatasetError, "data.unknown", "lilies")),
        ({"dataset": ""}, (ModelError, "model.none", "linear")),
    ],
)
def test_what_is_not_there_is_named(run_config: dict[str, Any], changes: dict[str, str], expected: Any) -> None:
    with raises(*expected):
        named(Setup.parse(run_config | changes))


@pytest.mark.parametrize("key", RunConfig.names())
def test_each_key_has_a_rule(run_config: dict[str, Any], key: str) -> None:
    """None takes -1: numbers are not below 0, and all others are text."""
    with raises(ConfigError, "config.wrong-value", key):
        Setup.parse(run_config | {key: -1})
