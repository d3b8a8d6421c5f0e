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
from umbel.simulation.sweep import Spec

pytestmark = pytest.mark.rest


@pytest.mark.usefixtures("in_process")
def test_every_combination_is_run_once_and_the_same_call_goes_on(
    umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measure that is also varied has a column of its own."""
    asked = {"rounds": [1, 2], "restarts": 1, "step_size": [0.05, 0.1]}
    found = umbel.sweep("synthetic", name="steps", **asked)
    assert found.columns.is_unique
    assert list(found.columns[:3]) == ["rounds", "step-size", "error"]
    assert found[["rounds", "step-size"]].to_numpy().tolist() == [[1, 0.05], [1, 0.1], [2, 0.05], [2, 0.1]]
    assert found["measured.rounds"].tolist() == [1, 1, 2, 2]
    assert (found["error"] == "").all()
    assert found["best.mean"].nunique() == 4
    monkeypatch.setattr("umbel.simulation.sweep._each", lambda *_: pytest.fail("it is done already"))
    again = umbel.sweep("synthetic", name="steps", **asked)
    assert again["best.mean"].tolist() == found["best.mean"].tolist()


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """The runs that a sweep would do; there are no results."""
    found: list[Spec] = []
    monkeypatch.setattr("umbel.simulation.sweeps.sweep_all", lambda specs, _: found.extend(specs))
    return found


def test_ranges_and_arrays_are_varied(umbel_home: Path, specs: list[Spec]) -> None:
    values = {"step_size": np.array([0.1, 0.2]), "seed": range(2), "rounds": [np.int64(3)], "restarts": np.int64(1)}
    with pytest.raises(TypeError):
        umbel.sweep("synthetic", name="steps", **values)
    configs = [one.config for one in specs]
    assert [(one["step-size"], one["seed"]) for one in configs] == [(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)]
    assert {type(one["rounds"]) for one in configs} == {type(one["restarts"]) for one in configs} == {int}


def test_a_run_of_long_values_has_a_name_that_a_file_system_takes(umbel_home: Path, specs: list[Spec]) -> None:
    options = [f"momentum momentum=0.{'5' * 300}{digit}" for digit in "12"]
    with pytest.raises(TypeError):
        umbel.sweep("synthetic", name="long", optimizer=options)
    names = {one.name for one in specs}
    assert len(names) == 2
    assert max(map(len, names)) < 200


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
