"""The run config: pyproject.toml says what the class says, and what cannot be run is refused with the fix."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tests.helpers.errors import raises
from tests.helpers.sources import ROOT
from tools.defaults import main, with_table
from umbel.models import LOSSES, METRICS, MODELS, SIZED
from umbel.privacy.mechanisms import MECHANISMS
from umbel.privacy.site.policy import Policy
from umbel.protocol.errors import ConfigError
from umbel.protocol.options import Options
from umbel.protocol.release import Clipping, NoisePer, RowPrivacy
from umbel.protocol.run_config import ClipSchedule, RunConfig
from umbel.strategies import STRATEGIES
from umbel_lab.attacks.__main__ import audit_command

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


# --- written down twice, and the same


def test_flower_hands_over_what_the_class_says() -> None:
    config = tomllib.loads(PYPROJECT)["tool"]["flwr"]["app"]["config"]
    defaults = RunConfig().entries()
    assert config == defaults
    assert {key: type(value) for key, value in config.items()} == {key: type(value) for key, value in defaults.items()}


def test_a_table_that_differs_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(PYPROJECT.replace("step-size = 0.1", "step-size = 0.2"), encoding="utf-8")
    main(path)
    assert path.read_text(encoding="utf-8") == PYPROJECT, "run make config"


def test_a_file_without_the_table_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"tool\.flwr\.app\.config"):
        with_table("[project]\n")


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda file: file.stem)
def test_every_config_that_comes_along_can_be_run(file: Any) -> None:
    config = tomllib.loads(file.read_text(encoding="utf-8"))
    run = RunConfig.parse(RunConfig().entries() | config)
    options = {key for key, value in run if isinstance(value, Options)}
    assert {key: value for key, value in config.items() if run.entries()[key] != value}.keys() <= options


def test_a_help_is_one_line_and_names_all_that_comes_along() -> None:
    [audited] = get_type_hints(audit_command, include_extras=True)["setting"].__metadata__
    helps = {name: help for settings in (Policy, RunConfig) for name, _, _, help in settings.table()}
    assert all(help and "\n" not in help for help in helps.values())
    for help, known in (
        (helps["strategy"], STRATEGIES), (helps["model"], MODELS | SIZED), (helps["loss"], LOSSES),
        (helps["metric"], {metric.name: metric for metric in METRICS.values()}), (helps["mechanism"], MECHANISMS),
        (helps["mechanisms"], MECHANISMS), (audited.help, MECHANISMS),
    ):  # fmt: skip
        assert known.keys() <= {*re.findall(r"[\w-]+", help)}


def test_entries_are_plain_values_that_come_back() -> None:
    run = RunConfig(noise_per=NoisePer.LAYER, clipping=Clipping.UPDATE, step_size=2, hypotheses=3, model="mlp")
    entries = run.entries()
    assert {type(value) for value in entries.values()} <= {int, float, str, bool}
    assert entries["noise-per"] == "layer"
    assert RunConfig.parse(entries) == run
    # A whole number will do for a real one.
    run = RunConfig.parse({"step-size": 1, "noise-multiplier": 0})
    assert (run.step_size, run.noise_multiplier, type(run.step_size)) == (1.0, 0.0, float)


# --- what is refused


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("rounds", (0, 2.0, "2", True)),
        *((key, (0,)) for key in ("clients-per-round", "restarts")),
        *((key, (-1,)) for key in ("patience", "seed", "batch-size", "local-epochs")),
        ("hypotheses", (1001,)),
        ("step-size", (0, True, "0.1", float("nan"), 10**400)),
        ("clipping", ("public floor=0.0", "public norm=0.0", "public decay=0.0", "secret")),
        ("validation", ("every=0",)),
        ("wait", ("nodes=0", "seconds=0", "until=3")),
        ("per-node", ("share=0",)),
        ("rows", (
            "clip=1 noise=1 rate=0.1 batch=0", "clip=1 noise=1 rate=1e-10 batch=3", "clip=1 noise=1 rate=0.1",
            "clip=1e-7 noise=1 rate=0.1 batch=3", "clip=1e7 noise=1 rate=0.1 batch=3",
        )),
        ("local-steps", (2**31 + 1,)),
        ("noise-multiplier", (-1.0, float("inf"))),
        ("message-noise", (-1.0,)),
        ("choice-epsilon", (31.0,)),
        ("quorum", (1.5,)),
        ("noise-per", ("parameter",)),
        ("device", ("tpu",)),
        ("strategy", (3,)),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_told_with_its_key(key: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with raises(ConfigError, "config.wrong-value", key):
            RunConfig.parse({key: value})


def rows(**changes: Any) -> dict[str, Any]:
    """Return the entries of a run that hides rows, of which some values are others."""
    values = {"clip": 1.0, "noise": 1.5, "rate": 0.3, "batch": 12.0} | changes
    text = " ".join(f"{name}={value!r}" for name, value in values.items())
    return {"protect": "rows", "noise-multiplier": 0.0, "rows": text}


@pytest.mark.parametrize(
    ("entries", "parts"),
    [
        ({"min-releases": 21}, "min-releases clients-per-round"),
        ({"clipping": "public decay=1e300"}, "decay"),
        ({"clipping": "public", "noise-per": "layer"}, "noise-per clipping"),
        ({"mechanism": "gaussian", "clipping": "update"}, "mechanism clipping"),
        ({"max-participations": 1, "per-node": "share=0.5"}, "max-participations per-node"),
        ({"local-epochs": 0}, "local-epochs local-steps"),
        ({"rows": "clip=1 noise=1 rate=0.1 batch=5"}, "rows protect"),
        ({"protect": "rows", "noise-multiplier": 0.0}, "rows"),
        (rows() | {"noise-multiplier": 1.0}, "noise-multiplier both"),
        (rows() | {"protect": "both"}, "noise-multiplier rows"),
        (rows() | {"message-noise": 1.0}, "message-noise"),
        (rows(rate=1e-7), "rate local-steps"),
    ],
)
def test_settings_that_do_not_go_together_are_named(entries: dict[str, Any], parts: str) -> None:
    with raises(ConfigError, "config.conflict", *parts.split()):
        RunConfig.parse(entries)


def test_an_unknown_key_is_told_with_the_nearest() -> None:
    for name, near in (("hypothesis", "hypotheses"), ("step_sise", "step-size"), ("data-path", "dataset")):
        with raises(ConfigError, "config.unknown-key", name, near):
            RunConfig.parse(RunConfig().entries() | {name: 1})


# --- what is made of it


def test_the_clip_norm_of_each_round_comes_from_one_key_and_shrinks_to_its_floor() -> None:
    run = RunConfig.parse({"clipping": "public floor=0.2 norm=3.0 decay=0.5"})
    assert run.clipping == ClipSchedule(Clipping.PUBLIC, 3.0, 0.5, 0.2)
    assert run.entries()["clipping"] == "public norm=3.0 decay=0.5 floor=0.2"
    public, update = (ClipSchedule(mode, norm=2.0, decay=0.5, floor=0.3) for mode in (Clipping.PUBLIC, Clipping.UPDATE))
    assert [public.at(round) for round in (1, 2, 3, 4, 5)] == [2, 1, 0.5, 0.3, 0.3]
    assert [update.at(round) for round in (1, 2, 50)] == [0.3, 0.3, 0.3], "that of an update is its floor"
    # One that stays finite in all rounds may grow; where updates are clipped the schedule plays no part.
    assert RunConfig.parse({"clipping": "public decay=1e3", "rounds": 100}).clipping.at(100) == 2e297
    assert RunConfig.parse({"clipping": "update decay=1e300"}).clipping.at(100) == 0.01


@pytest.mark.parametrize(
    ("epochs", "steps", "rate", "expected"), [(3, 0, 0.1, 30), (1, 0, 0.3, 4), (5, 7, 0.3, 7), (2, 0, 1.0, 2)]
)
def test_training_that_hides_rows_has_as_many_steps_as_its_epochs_at_its_rate(
    epochs: int, steps: int, rate: float, expected: int
) -> None:
    run = RunConfig.parse(rows(rate=rate) | {"local-epochs": epochs, "local-steps": steps})
    assert run.training().row_privacy == RowPrivacy(1.0, 1.5, rate, 12.0, expected)
    release = run.release(5, 1)
    assert (release.row_noise_multiplier, release.row_rate, release.row_steps) == (1.5, rate, expected)
    assert RunConfig().training().row_privacy is None, "by default a run hides clients"
    assert not RunConfig().release(5, 2).by_rows
