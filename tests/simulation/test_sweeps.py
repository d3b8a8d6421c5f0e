"""Many runs from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbel
from tests.helpers.errors import raises
from tests.lab.experiments.conftest import in_process  # noqa: F401
from umbel.protocol.errors import ConfigError, DatasetError, SweepError

pytestmark = pytest.mark.rest


@pytest.mark.usefixtures("in_process")
def test_every_combination_is_run_once_and_the_same_call_goes_on(
    umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"rounds": 2, "restarts": 1, "step_size": [0.05, 0.1], "seed": [0, 1]}
    found = umbel.sweep("synthetic", name="steps", **asked)
    assert list(found.columns[:3]) == ["step-size", "seed", "error"]
    assert found[["step-size", "seed"]].to_numpy().tolist() == [[0.05, 0], [0.05, 1], [0.1, 0], [0.1, 1]]
    assert (found["rounds"] == 2).all()
    assert (found["error"] == "").all()
    assert found["best.mean"].nunique() == 4
    monkeypatch.setattr("umbel.simulation.sweep._each", lambda *_: pytest.fail("it is done already"))
    again = umbel.sweep("synthetic", name="steps", **asked)
    assert again["best.mean"].tolist() == found["best.mean"].tolist()


def test_ranges_and_arrays_are_varied(umbel_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "umbel.simulation.sweeps.sweep_all", lambda specs, _: configs.extend(one.config for one in specs)
    )
    with pytest.raises(TypeError):  # there are no results
        umbel.sweep(
            "synthetic", name="steps", step_size=np.array([0.1, 0.2]), seed=range(2), rounds=[np.int64(3)],
            restarts=np.int64(1),
        )  # fmt: skip
    assert [(one["step-size"], one["seed"]) for one in configs] == [(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)]
    assert {type(one["rounds"]) for one in configs} == {type(one["restarts"]) for one in configs} == {int}


@pytest.mark.usefixtures("in_process")
def test_a_measure_that_is_also_varied_has_a_column_of_its_own(umbel_home: Path) -> None:
    found = umbel.sweep("synthetic", name="lengths", rounds=[1, 2], restarts=1)
    assert found.columns.is_unique
    assert found["rounds"].tolist() == found["measured.rounds"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("values", "kind", "code", "part"),
    [
        ({"seed": 1}, ConfigError, "config.nothing-varied", ""),
        ({"seed": []}, ConfigError, "config.nothing-varied", ""),
        ({"seed": [1, 2], "epsilon": 4}, ConfigError, "config.sweep-epsilon", "noise_multiplier"),
        ({"seed": [1, 2], "resume": "last"}, ConfigError, "config.sweep-resume", "resume"),
        ({"seed": [1, 1]}, SweepError, "sweep.same-name", "'seed=1'"),
        ({"sed": [1, 2]}, ConfigError, "config.unknown-key", "seed?"),
        ({"step_size": [0.1, 0.0]}, ConfigError, "config.wrong-value", "step-size"),
        ({"dataset": ["synthetic", "nowhere"]}, DatasetError, "data.unknown", "'nowhere'"),
    ],
)
def test_what_cannot_be_run_is_named_before_any_work(
    umbel_home: Path, values: dict[str, object], kind: Any, code: str, part: str
) -> None:
    with raises(kind, code, part):
        umbel.sweep("synthetic", name="steps", **values)
    assert not (umbel_home / "sweeps").exists()


def test_a_run_of_long_values_has_a_name_that_a_file_system_takes(
    umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr("umbel.simulation.sweeps.sweep_all", lambda specs, _: names.extend(s.name for s in specs))
    options = [f"momentum momentum=0.{'5' * 300}{digit}" for digit in "12"]
    with pytest.raises(TypeError):  # there are no results
        umbel.sweep("synthetic", name="long", optimizer=options)
    assert len({*names}) == 2
    assert max(map(len, names)) < 200
