"""A run config is checked before any work starts, and an error names the key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation import Manifest, write_federation, write_leaf
from protocol.errors import ConfigError
from server.settings import Settings
from strategies import IFCA, FedAvg, GroupPrivacy, RadiusSchedule

DEFAULTS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"][
    "app"
]["config"]
NAN, INF = float("nan"), float("inf")

# The least that each key accepts; what is below is refused.
WHOLE = {
    "hypotheses": 1,
    "rounds": 1,
    "patience": 0,
    "clients-per-round": 1,
    "validation-clients-per-round": 0,
    "validate-every": 1,
    "min-releases": 1,
    "restarts": 1,
    "seed": 0,
    "local-epochs": 0,
    "local-steps": 0,
    "batch-size": 0,
    "min-nodes": 1,
    "attack-after": 0,
    "attack-victims": 1,
    "attack-interactions": 1,
    "leak-meter": 0,
}
ABOVE_ZERO = ["step-size", "radius-floor", "radius-start", "radius-decay", "node-wait", "round-timeout", "quorum"]
NOT_NEGATIVE = ["noise-multiplier", "message-noise", "attack-error"]
NUMBERS = [*ABOVE_ZERO, *NOT_NEGATIVE]
TEXTS = ["strategy", "federation", "model", "loss", "device", "engine", "radius", "noise-per", "attack", "resume"]
TEXTS += ["attack-multipliers"]

FACTORS = {"strategy": "recommender", "federation": "preferences", "noise-multiplier": 0.0}
ATTACK = FACTORS | {"strategy": "pac-attack", "rounds": 3031}


def reads(key: str) -> dict[str, Any]:
    """Return what makes a run read a key; the attack's are read by the attack alone."""
    return ATTACK if key.startswith("attack") else {}


def test_every_key_is_tried_here() -> None:
    assert sorted([*WHOLE, *NUMBERS, *TEXTS]) == sorted(DEFAULTS)


# --- what is accepted


def test_the_defaults_run_algorithm_1_on_the_papers_synthetic_data(run_config: dict[str, Any]) -> None:
    settings = Settings.parse(run_config)
    strategy = settings.strategy
    assert type(strategy) is GroupPrivacy
    assert (strategy.hypotheses, strategy.clients_per_round, strategy.validation_clients_per_round) == (2, 7, 0)
    assert (strategy.min_releases, strategy.min_nodes, strategy.node_wait) == (1, 1, 300.0)
    assert strategy.radius == RadiusSchedule("update", floor=0.01, start=1.0, decay=1.0)
    assert (settings.model.name, settings.model.loss.name) == ("linear", "mse")
    assert settings.manifest is not None
    assert settings.manifest.name == "synthetic"
    assert (settings.rounds, settings.patience, settings.validate_every, settings.restarts) == (100, 0, 1, 5)
    assert settings.train_config == {
        "local_epochs": 1,
        "local_steps": 0,
        "step_size": 0.1,
        "batch_size": 10,
        "noise_multiplier": 5.0,
        "noise_per": "vector",
        "message_noise": 0.0,
    }


def test_each_value_goes_where_it_belongs(run_config: dict[str, Any]) -> None:
    # Values that tell the keys apart.
    run_config |= {"hypotheses": 3, "clients-per-round": 11, "validation-clients-per-round": 12, "min-releases": 4}
    run_config |= {"seed": 13, "min-nodes": 5, "node-wait": 14.0, "round-timeout": 15.0, "rounds": 16, "patience": 17}
    run_config |= {"validate-every": 18, "restarts": 19, "local-epochs": 20, "step-size": 0.21, "batch-size": 22}
    run_config |= {"noise-multiplier": 23.0, "local-steps": 27}
    run_config |= {"radius": "public", "radius-floor": 0.24, "radius-start": 25.0, "radius-decay": 0.26}
    settings = Settings.parse(run_config)
    strategy = settings.strategy
    assert (strategy.hypotheses, strategy.clients_per_round, strategy.validation_clients_per_round) == (3, 11, 12)
    assert (strategy.min_releases, strategy.seed, strategy.min_nodes, strategy.node_wait) == (4, 13, 5, 14.0)
    assert strategy.radius == RadiusSchedule("public", floor=0.24, start=25.0, decay=0.26)
    assert (settings.seed, settings.round_timeout, settings.rounds, settings.patience) == (13, 15.0, 16, 17)
    assert (settings.validate_every, settings.restarts) == (18, 19)
    assert settings.train_config == {
        "local_epochs": 20,
        "local_steps": 27,
        "step_size": 0.21,
        "batch_size": 22,
        "noise_multiplier": 23.0,
        "noise_per": "vector",
        "message_noise": 0.0,
    }


@pytest.mark.parametrize(
    ("name", "strategy", "hypotheses"),
    [
        ("group-privacy", GroupPrivacy, 2),
        ("fedavg", FedAvg, 1),
        ("ifca", IFCA, 2),
        ("strategies.fedavg:FedAvg", FedAvg, 1),
    ],
)
def test_a_strategy_goes_by_its_name(run_config: dict[str, Any], name: str, strategy: type, hypotheses: int) -> None:
    chosen = Settings.parse(run_config | {"strategy": name}).strategy
    assert type(chosen) is strategy
    assert chosen.hypotheses == hypotheses


def test_noisy_messages_are_for_models_with_a_local_part(run_config: dict[str, Any]) -> None:
    noisy = run_config | {"message-noise": 0.5}
    assert Settings.parse(noisy | FACTORS).train_config["message_noise"] == 0.5
    with pytest.raises(ConfigError, match=r"^message-noise is for factor models, not 'linear'; set it to 0$"):
        Settings.parse(noisy)


def test_a_model_with_a_local_part_comes_as_one_hypothesis(run_config: dict[str, Any]) -> None:
    factors = run_config | {"strategy": "ifca", "federation": "preferences"}
    assert Settings.parse(factors | {"hypotheses": 1}).strategy.hypotheses == 1
    with pytest.raises(
        ConfigError, match=r"^model 'factors-100x8' has a local part and comes as one .* hypotheses = 1$"
    ):
        Settings.parse(factors)


def test_the_leak_meter_is_off_unless_asked_for_and_needs_a_federation(run_config: dict[str, Any]) -> None:
    assert Settings.parse(run_config).leak_meter is None
    meter = Settings.parse(run_config | {"leak-meter": 4}).leak_meter
    assert meter is not None
    assert meter.every == 4
    with pytest.raises(ConfigError, match=r"^leak-meter is for simulation; name a federation or set it to 0$"):
        Settings.parse(run_config | {"leak-meter": 4, "federation": "", "model": "mlp"})


def test_model_and_loss_of_the_run_config_come_before_the_federations(run_config: dict[str, Any]) -> None:
    def names(**changes: str) -> tuple[str, str]:
        model = Settings.parse(run_config | changes).model
        return model.name, model.loss.name

    assert names() == ("linear", "mse")
    assert names(loss="rmse") == ("linear", "rmse")
    assert names(model="cnn") == ("cnn", "cross-entropy")
    assert names(model="mlp", loss="mse") == ("mlp", "mse")


def test_without_a_federation_every_node_serves_its_own(run_config: dict[str, Any]) -> None:
    settings = Settings.parse(run_config | {"federation": "", "model": "mlp"})
    assert settings.manifest is None
    assert settings.model.name == "mlp"


def test_whole_numbers_do_for_numbers(run_config: dict[str, Any]) -> None:
    settings = Settings.parse(run_config | {"noise-multiplier": 0, "step-size": 1, "node-wait": 10})
    assert settings.train_config["noise_multiplier"] == 0.0
    assert settings.train_config["step_size"] == 1.0
    assert isinstance(settings.train_config["step_size"], float)
    assert settings.strategy.node_wait == 10.0


def test_the_server_reads_what_a_federation_says_of_itself(run_config: dict[str, Any], umbel_home: Path) -> None:
    folder = umbel_home / "data" / "mine"
    manifest = Manifest(name="mine", clients=1, split={"train": 1, "validation": 0}, model="mlp")
    write_federation(folder, manifest, np.zeros((1, 3)), np.zeros(1), np.array([0, 1]))
    assert Settings.parse(run_config | {"federation": "mine"}).manifest == manifest


def test_data_that_cannot_be_used_are_an_error_at_once(run_config: dict[str, Any], umbel_home: Path) -> None:
    """A simulation should not start its nodes first."""
    path = umbel_home / "data" / "mine.json"
    manifest = Manifest(name="mine", clients=1, split={"train": 1, "validation": 0}, model="linear")
    write_leaf(path, manifest, {"a": ([[1.5, 2.0]], [0.5])})
    path.write_text(path.read_text().replace("1.5", "NaN"))
    with pytest.raises(ConfigError, match="features of client 0, row 0, are not finite"):
        Settings.parse(run_config | {"federation": str(path)})


@pytest.mark.parametrize("unit", ["layer", "row"])
def test_parts_are_noised_by_themselves_only_where_the_radius_is_the_updates(
    run_config: dict[str, Any], unit: str
) -> None:
    run_config["noise-per"] = unit
    assert Settings.parse(run_config).train_config["noise_per"] == unit
    with pytest.raises(ConfigError, match=f'noise-per = "{unit}" goes with radius = "update" alone'):
        Settings.parse(run_config | {"radius": "public"})


# --- what is refused


@pytest.mark.parametrize("key", sorted(DEFAULTS))
def test_a_missing_key_is_named(run_config: dict[str, Any], key: str) -> None:
    run_config |= reads(key)
    del run_config[key]
    with pytest.raises(ConfigError, match=f"^the run config lacks {key}; its default is in pyproject.toml"):
        Settings.parse(run_config)


@pytest.mark.parametrize("key", WHOLE)
@pytest.mark.parametrize("wrong", ["below", -1, 1.0, 2.5, True, "1", NAN])
def test_what_must_be_a_whole_number(run_config: dict[str, Any], key: str, wrong: Any) -> None:
    least = WHOLE[key]
    value = least - 1 if wrong == "below" else wrong
    with pytest.raises(ConfigError, match=f"^{key} must be a whole number of at least {least}, got {value!r}$"):
        Settings.parse(run_config | reads(key) | {key: value})


def test_the_least_of_everything_is_accepted(run_config: dict[str, Any]) -> None:
    settings = Settings.parse(run_config | WHOLE | {"local-epochs": 1})
    assert (settings.rounds, settings.strategy.clients_per_round, settings.train_config["batch_size"]) == (1, 1, 0)


@pytest.mark.parametrize("key", ABOVE_ZERO)
@pytest.mark.parametrize("wrong", [0, 0.0, -0.1, NAN, INF, -INF, True, "0.1"])
def test_what_must_be_above_zero(run_config: dict[str, Any], key: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key} must be a finite number above 0, got {wrong!r}$"):
        Settings.parse(run_config | {key: wrong})


@pytest.mark.parametrize("key", NOT_NEGATIVE)
@pytest.mark.parametrize("wrong", [-0.1, -1, NAN, INF, -INF, False, "5"])
def test_what_must_not_be_negative(run_config: dict[str, Any], key: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key} must be a finite number of at least 0, got {wrong!r}$"):
        Settings.parse(run_config | reads(key) | {key: wrong})


def test_a_quorum_is_a_share(run_config: dict[str, Any]) -> None:
    assert Settings.parse(run_config | {"quorum": 0.8}).strategy.quorum == 0.8
    with pytest.raises(ConfigError, match=r"quorum is a share of the clients asked, at most 1, got 1\.5"):
        Settings.parse(run_config | {"quorum": 1.5})


def test_a_run_trains_for_epochs_or_for_steps(run_config: dict[str, Any]) -> None:
    Settings.parse(run_config | {"local-epochs": 0, "local-steps": 1})
    with pytest.raises(ConfigError, match="local-epochs = 0 and local-steps = 0 train nothing"):
        Settings.parse(run_config | {"local-epochs": 0})


@pytest.mark.parametrize("key", TEXTS)
@pytest.mark.parametrize("wrong", [1, 0.5, True])
def test_what_must_be_text(run_config: dict[str, Any], key: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key} must be text, got {wrong!r}$"):
        Settings.parse(run_config | reads(key) | {key: wrong})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"radius": "private"}, "radius must be one of update, public, got 'private'"),
        ({"radius": ""}, "radius must be one of update, public, got ''"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"engine": "warp"}, "engine must be one of auto, loop, batched, got 'warp'"),
        ({"strategy": "fedprox"}, "unknown strategy 'fedprox'; choose from group-privacy, fedavg, ifca"),
        ({"strategy": ""}, "unknown strategy ''; choose from"),
        ({"strategy": "nowhere:Mine"}, "cannot import 'nowhere' of 'nowhere:Mine'"),
        ({"strategy": "protocol:Demand"}, "strategy 'protocol:Demand' is no class built on"),
        ({"model": "resnet"}, "unknown model 'resnet'; choose from linear, mlp, cnn"),
        ({"loss": "absolute"}, "unknown loss 'absolute'; choose from mse, rmse, cross-entropy"),
        ({"federation": "lilies"}, "no federation 'lilies': looked for .*; build it with its recipe"),
        ({"federation": ""}, "neither run config nor federation name a model; set model to one of linear, mlp, cnn"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(
    run_config: dict[str, Any], changes: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Settings.parse(run_config | changes)


def test_a_federation_without_a_model_needs_one(run_config: dict[str, Any], umbel_home: Path) -> None:
    manifest = Manifest(name="mine", clients=1, split={"train": 1, "validation": 0})
    write_leaf(umbel_home / "data" / "mine.json", manifest, {"a": ([[1.0, 2.0]], [0.5])})
    changes = {"federation": str(umbel_home / "data" / "mine.json")}
    with pytest.raises(ConfigError, match="neither run config nor federation name a model"):
        Settings.parse(run_config | changes)
    assert Settings.parse(run_config | changes | {"model": "linear"}).model.name == "linear"


def test_a_federation_that_cannot_be_read_is_named(run_config: dict[str, Any], umbel_home: Path) -> None:
    folder = umbel_home / "data" / "empty"
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{folder}/manifest.json is missing"):
        Settings.parse(run_config | {"federation": "empty"})


def test_more_releases_than_clients_are_asked_can_never_come(run_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"min-releases = 8 .* clients-per-round = 7"):
        Settings.parse(run_config | {"min-releases": 8})


def test_a_radius_that_grows_out_of_all_bounds_is_found_before_the_last_round(run_config: dict[str, Any]) -> None:
    growing = {"radius": "public", "radius-decay": 2.0}
    Settings.parse(run_config | growing | {"rounds": 1000})
    with pytest.raises(ConfigError, match="radius-decay"):
        Settings.parse(run_config | growing | {"rounds": 1100})
