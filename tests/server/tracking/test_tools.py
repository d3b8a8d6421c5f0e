"""The tools that runs can be followed in: what each has on record, read back through its own means.

mlflow server --port 5000 &
MLFLOW_TRACKING_URI=http://127.0.0.1:5000 pytest tests/server/tracking/test_tools.py
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import umbel.client.app
from tests.helpers.errors import raises
from tests.helpers.runs import AppRun, run_app
from umbel.protocol.errors import ConfigError
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import play

pytestmark = pytest.mark.usefixtures("blank_figures")
URI = os.environ.get("MLFLOW_TRACKING_URI", "")
needs_mlflow = pytest.mark.skipif(not find_spec("mlflow"), reason="MLflow is not installed")


def run_with(config: dict[str, Any]) -> AppRun:
    return run_app(config, InProcessGrid(umbel.client.app.app, config))


def with_two_more_rounds(config: dict[str, Any]) -> AppRun:
    """A run of two rounds that goes on for two more."""
    return run_with(config | {"rounds": 4, "resume": run_with(config | {"rounds": 2}).folder.name})


# --- MLflow


@pytest.mark.rest
@needs_mlflow
@pytest.mark.skipif(not URI, reason="MLFLOW_TRACKING_URI names no server")
def test_a_run_and_what_is_added_to_it_is_one_run_on_the_server(run_config: dict[str, Any]) -> None:
    from mlflow import MlflowClient

    config = run_config | {"restarts": 1, "track": "mlflow experiment=umbel-tests"}
    run = with_two_more_rounds(config)

    server = MlflowClient(URI)
    experiment = server.get_experiment_by_name("umbel-tests")
    assert experiment is not None
    (there,) = server.search_runs([experiment.experiment_id], f"tags.`umbel.run` = '{run.folder.name}'")
    try:
        assert there.info.status == "FINISHED"
        assert there.info.run_name == run.folder.name
        assert there.data.params["strategy"] == "group-privacy"
        assert there.data.params["parameters"] == "2"
        assert there.data.tags["umbel.stopped"] == "all 4 rounds done"
        losses = {one.step: one.value for one in server.get_metric_history(there.info.run_id, "validation_loss")}
        assert losses == {entry["number"]: pytest.approx(entry["loss"]) for entry in run.history}
        assert there.data.metrics["paper_budget"] == pytest.approx(0.4 * run.history[-1]["max_participations"])
    finally:
        server.delete_run(there.info.run_id)


@pytest.mark.rest
@needs_mlflow
def test_it_must_be_said_where(run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with raises(ConfigError, "config.track", "track", "uri="):
        play(run_config | {"rounds": 1, "restarts": 1, "track": "mlflow"})


@needs_mlflow
@pytest.mark.slow
def test_a_password_does_not_get_into_reports(run_config: dict[str, Any]) -> None:
    options = {"track": "mlflow uri=http://me:secret@127.0.0.1:9"}
    with raises(ConfigError, "config.track-password", "MLFLOW_TRACKING_USERNAME"):
        play(run_config | {"rounds": 1, "restarts": 1, **options})


# --- TensorBoard


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_a_run_and_what_is_added_to_it_is_read_back(run_config: dict[str, Any]) -> None:
    run = with_two_more_rounds(run_config | {"restarts": 1, "track": "tensorboard"})
    events = read(run.folder / "tensorboard")
    losses = [(one.step, one.value) for one in events.Scalars("validation_loss")]
    assert losses == [(entry["number"], pytest.approx(entry["loss"])) for entry in run.history]
    assert [one.value for one in events.Scalars("releases")] == [7] * 4
    assert b"| strategy | group-privacy |" in events.Tensors("run config/text_summary")[0].tensor_proto.string_val[0]


def test_a_run_without_a_folder_needs_to_be_told_of_one(run_config: dict[str, Any], tmp_path: Path) -> None:
    config = run_config | {"rounds": 1, "restarts": 1, "track": "tensorboard"}
    with raises(ConfigError, "config.track", "track"):
        play(config)
    with raises(ConfigError, "config.track", "here"):
        play(config | {"track": "tensorboard folder=here"})
    play(config | {"track": f"tensorboard folder={tmp_path}"})
    assert len(read(tmp_path).Scalars("validation_loss")) == 2


# --- Weights & Biases


def records(content: bytes, block: int = 32768) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format: blocks of parts, each with its checksum, length and kind."""
    at, record = 7, b""  # what comes first says whose file it is
    while at + 7 <= len(content):
        if (left := block - at % block) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


@pytest.mark.rest
def test_a_run_is_kept_in_its_folder(run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = run_with(run_config | {"rounds": 2, "restarts": 1, "track": "wandb"})
    (file,) = run.folder.glob("wandb/offline-run-*/*.wandb")
    losses, told = {}, {}
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        if "validation_loss" in values:
            losses[values["_step"]] = values["validation_loss"]
        told |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    assert losses == {entry["number"]: pytest.approx(entry["loss"]) for entry in run.history}
    assert told["strategy"] == "group-privacy"
