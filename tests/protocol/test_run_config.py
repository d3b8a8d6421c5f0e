"""The run config: pyproject.toml says what the class says, and what cannot be run is refused with the fix."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from tests.helpers.sources import ROOT
from umbel.protocol.errors import ConfigError
from umbel.protocol.release import Clipping, ClipSchedule, NoisePer
from umbel.protocol.rules import shown
from umbel.protocol.run_config import RunConfig

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


# --- written down twice, and the same


def test_flower_hands_over_what_the_class_says() -> None:
    config = tomllib.loads(PYPROJECT)["tool"]["flwr"]["app"]["config"]
    defaults = RunConfig().entries()
    assert config == defaults
    assert {key: type(value) for key, value in config.items()} == {key: type(value) for key, value in defaults.items()}


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda file: file.stem)
def test_every_config_that_comes_along_can_be_run(file: Any) -> None:
    config = tomllib.loads(file.read_text(encoding="utf-8"))
    entries = RunConfig.parse(RunConfig().entries() | config).entries()
    assert {key: entries[key] for key in config} == config


def test_every_key_has_a_help_of_one_line() -> None:
    for name, _, _, help in RunConfig.table():
        assert help, name
        assert "\n" not in help, name


def test_entries_are_plain_values_that_come_back() -> None:
    run = RunConfig(noise_per=NoisePer.LAYER, step_size=2, hypotheses=3, model="mlp")
    entries = run.entries()
    assert {type(value) for value in entries.values()} <= {int, float, str, bool}
    assert entries["noise-per"] == "layer"
    assert RunConfig.parse(entries) == run


def test_defaults_are_shown_as_they_stand_in_toml() -> None:
    for name, default, _, _ in RunConfig.table():
        assert tomllib.loads(f"{name} = {default}") == {name: RunConfig().entries()[name]}
        assert shown(RunConfig().entries()[name]) == default


# --- what is refused


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"rounds": 2.0}, "rounds must be a whole number of at least 1, got 2.0"),
        ({"rounds": "2"}, "rounds must be a whole number of at least 1, got '2'"),
        ({"rounds": True}, "rounds must be a whole number of at least 1, got True"),
        ({"hypotheses": 1001}, "hypotheses must be a whole number of at least 0, at most 1000, got 1001"),
        ({"patience": -1}, "patience must be a whole number of at least 0, got -1"),
        ({"clients-per-round": 0}, "clients-per-round must be a whole number of at least 1, got 0"),
        ({"validate-every": 0}, "validate-every must be a whole number of at least 1, got 0"),
        ({"restarts": 0}, "restarts must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"batch-size": -1}, "batch-size must be a whole number of at least 0, got -1"),
        ({"step-size": 0}, "step-size must be a finite number above 0, got 0.0"),
        ({"step-size": True}, "step-size must be a finite number above 0, got True"),
        ({"step-size": "0.1"}, "step-size must be a finite number above 0, got '0.1'"),
        ({"step-size": float("nan")}, "step-size must be a finite number above 0, got nan"),
        ({"noise-multiplier": float("inf")}, "noise-multiplier must be a finite number of at least 0, got inf"),
        ({"noise-multiplier": -1.0}, "noise-multiplier must be a finite number of at least 0, got -1.0"),
        ({"message-noise": -1.0}, "message-noise must be a finite number of at least 0, got -1.0"),
        ({"clip-norm-floor": 0.0}, "clip-norm-floor must be a finite number above 0, got 0.0"),
        ({"clipping": "secret"}, "clipping must be one of update, public, got 'secret'"),
        ({"noise-per": "parameter"}, "noise-per must be one of vector, layer, row, got 'parameter'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"engine": "steam"}, "engine must be one of auto, loop, batched, got 'steam'"),
        ({"strategy": 3}, "strategy must be text, got 3"),
        ({"quorum": 1.5}, "quorum must be a finite number above 0, at most 1, got 1.5"),
        ({"node-wait": 0}, "node-wait must be a finite number above 0, got 0.0"),
        ({"min-releases": 8}, "min-releases = 8 is more than clients-per-round = 7; lower it"),
        (
            {"clipping": "public", "clip-norm-decay": 1e300},
            r"clip-norm-decay = 1e\+300 makes the clip norm infinite in 100 rounds; lower it",
        ),
        (
            {"clipping": "public", "noise-per": "layer"},
            'noise-per = "layer" works only with clipping = "update"; change one of them',
        ),
        ({"local-epochs": 0}, "local-epochs = 0 and local-steps = 0 train nothing; set one of them"),
    ],
)
def test_what_cannot_be_run_is_told_with_its_key(entries: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^{reason}$"):
        RunConfig.parse(entries)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("hypothesis", "there is no hypothesis; did you mean hypotheses?"),
        ("step_sise", "there is no step_sise; did you mean step-size?"),
        ("leak-meter", "there is no leak-meter"),
        ("data-path", "there is no data-path; did you mean dataset?"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"the run config: {told}") + "$"):
        RunConfig.parse(RunConfig().entries() | {name: 1})


def test_a_whole_number_will_do_for_a_real_one() -> None:
    run = RunConfig.parse({"step-size": 1, "noise-multiplier": 0})
    assert (run.step_size, run.noise_multiplier) == (1.0, 0.0)
    assert type(run.step_size) is float


# --- what is made of it


def test_the_radius_of_each_round_comes_from_four_keys() -> None:
    keys = {"clipping": "public", "clip-norm-floor": 0.2, "clip-norm": 3.0, "clip-norm-decay": 0.5}
    run = RunConfig.parse(keys)
    assert run.clipping is Clipping.PUBLIC
    assert run.schedule == ClipSchedule(Clipping.PUBLIC, 0.2, 3.0, 0.5)


def test_a_radius_that_stays_finite_in_all_rounds_may_grow() -> None:
    assert RunConfig.parse({"clipping": "public", "clip-norm-decay": 1e3, "rounds": 100}).clip_norm_bounded
    # With radius update the schedule plays no part.
    assert RunConfig.parse({"clip-norm-decay": 1e300}).clip_norm_bounded
