"""TensorBoard: what is in the event file, read by TensorBoard itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import umbel.client.app
from tests.helpers.errors import raises
from tests.helpers.runs import run_app
from umbel.protocol.errors import ConfigError
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import play

pytestmark = pytest.mark.usefixtures("blank_figures")


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_a_run_and_what_is_added_to_it_is_read_back(run_config: dict[str, Any]) -> None:
    config = run_config | {"rounds": 2, "restarts": 1, "track": "tensorboard"}
    run = run_app(config, InProcessGrid(umbel.client.app.app, config))
    longer = config | {"rounds": 4, "resume": run.folder.name}
    run = run_app(longer, InProcessGrid(umbel.client.app.app, longer))
    events = read(run.folder / "tensorboard")
    losses = [(one.step, one.value) for one in events.Scalars("validation_loss")]
    assert losses == [(entry["number"], pytest.approx(entry["loss"])) for entry in run.history]
    assert [one.value for one in events.Scalars("releases")] == [7] * 4
    assert b"| strategy | group-privacy |" in events.Tensors("run config/text_summary")[0].tensor_proto.string_val[0]


def test_a_run_without_a_folder_needs_to_be_told_of_one(run_config: dict[str, Any], tmp_path: Path) -> None:
    config = run_config | {"rounds": 1, "restarts": 1, "track": "tensorboard"}
    with raises(ConfigError, "config.track-options", "track-options"):
        play(config)
    with raises(ConfigError, "config.track-options", "here"):
        play(config | {"track-options": "folder=here"})
    play(config | {"track-options": f"folder={tmp_path}"})
    assert len(read(tmp_path).Scalars("validation_loss")) == 2
