"""The tools in which runs can be followed: what each has on record, and that one which fails ends no run.

mlflow server --port 5000 &
MLFLOW_TRACKING_URI=http://127.0.0.1:5000 pytest tests/server/test_tracking.py
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

import umbel.client.app
from tests.helpers.errors import raises
from tests.helpers.runs import AppRun, run_app
from umbel.cli.main import app
from umbel.protocol.errors import ConfigError
from umbel.server.tracking import TRACKERS, MLflow, figures, spent
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import play

pytestmark = pytest.mark.usefixtures("blank_figures")
URI = os.environ.get("MLFLOW_TRACKING_URI", "")


def run_with(config: dict[str, Any]) -> AppRun:
    return run_app(config, InProcessGrid(umbel.client.app.app, config))


def with_two_more_rounds(config: dict[str, Any]) -> AppRun:
    """A run of two rounds that goes on for two more."""
    return run_with(config | {"rounds": 4, "resume": run_with(config | {"rounds": 2}).folder.name})


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


# --- what is told


def test_the_figures_are_those_of_the_run_folder(run_config: dict[str, Any]) -> None:
    run = play(run_config | {"rounds": 1, "restarts": 1, "validation": "every=2"})
    start, first = run.state.history
    assert "validation_loss" in figures(run, start)
    assert "asked" not in figures(run, start), "nobody trained before the first round"
    assert figures(run, first) == {
        "seconds": first.seconds, "validation_loss": first.loss, "best_validation_loss": run.state.best_loss,
        "validation_rmse": first.metric, "validation_loss_p10": first.loss_spread[0],
        "validation_loss_p90": first.loss_spread[-1], "asked": 7, "releases": 7, "lost_nodes": 0,
        "max_participations": first.max_participations,
    }  # fmt: skip
    odd = replace(first, loss=math.inf, metric=math.nan)
    assert not {"validation_loss", "validation_rmse"} & figures(run, odd).keys(), "no tool draws what is no number"


def test_the_guarantee_and_the_heuristic_have_names_of_their_own(run_config: dict[str, Any]) -> None:
    """Two parameters at nu = 5: 2/5 a participation, and with a public clip norm 4/5 and the choice on top."""
    config = run_config | {"rounds": 3, "restarts": 1}
    paper, formal = play(config), play(config | {"clipping": "public", "choice-epsilon": 0.2})
    times = paper.state.history[-1].max_participations
    assert spent(paper) == {"paper_budget": pytest.approx(0.4 * times)}, "nothing is guaranteed"
    assert spent(formal)["epsilon"] <= 1.0 * formal.setup.config.most_participations + 1e-9


# --- TensorBoard


def test_a_run_and_what_is_added_to_it_is_read_back_and_removed_with_the_run(run_config: dict[str, Any]) -> None:
    run = with_two_more_rounds(run_config | {"restarts": 1, "observers": "tensorboard"})
    events = read(run.folder / "tensorboard")
    losses = [(one.step, one.value) for one in events.Scalars("validation_loss")]
    assert losses == [(entry["number"], pytest.approx(entry["loss"])) for entry in run.history]
    assert [one.value for one in events.Scalars("releases")] == [7] * 4
    assert b"| strategy | group-privacy |" in events.Tensors("run config/text_summary")[0].tensor_proto.string_val[0]
    assert CliRunner().invoke(app, ["runs", "rm", run.folder.name, "--yes"]).exit_code == 0
    assert not run.folder.exists()


def test_a_link_in_place_of_the_events_is_not_removed(run_config: dict[str, Any], tmp_path: Path) -> None:
    run = run_with(run_config | {"rounds": 1, "restarts": 1})
    (run.folder / "tensorboard").symlink_to(tmp_path)
    done = CliRunner().invoke(app, ["runs", "rm", run.folder.name, "--yes"])
    assert (done.exit_code, "[config.not-a-run-alone]" in done.output) == (2, True)
    assert run.folder.exists()


# --- what ends a run before its first round, and what does not


@pytest.mark.parametrize(
    ("name", "code", "part"),
    [
        *((name, "config.missing-library", name) for name in TRACKERS),
        ("tensorboard", "config.track-where", "tensorboard"),  # a run without a folder
        ("mlflow", "config.track-where", "MLFLOW_TRACKING_URI"),
        ("mlflow", "config.track-failed", "no route;"),
    ],
)
def test_what_cannot_be_followed_is_told_before_the_first_round(
    run_config: dict[str, Any], mlflow: MagicMock, monkeypatch: pytest.MonkeyPatch, name: str, code: str, part: str
) -> None:
    mlflow.get_experiment_by_name.side_effect = OSError("no route.\nTraceback")
    found = None if code == "config.missing-library" else Mock()
    monkeypatch.setattr("umbel.server.tracking.find_spec", lambda name: found)
    if code == "config.track-where":
        monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with raises(ConfigError, code, part):
        play(run_config | {"rounds": 1, "restarts": 1, "observers": name})


def test_a_server_that_fails_later_is_left_alone_with_one_warning(
    run_config: dict[str, Any], mlflow: MagicMock, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow.log_batch.side_effect = [None, None, OSError("the disk is full.\nTraceback")]
    run = play(run_config | {"rounds": 3, "restarts": 1}, observers=[MLflow()])
    assert run.state.stopped == "all 3 rounds done"
    (warning,) = (line for line in caplog.messages if line.startswith("observers:"))
    assert warning.endswith("the disk is full")


# --- MLflow


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """MLflow's client, of a server that knows no run."""
    client, library, entities = MagicMock(), ModuleType("mlflow"), ModuleType("mlflow.entities")
    client.search_runs.return_value = []
    monkeypatch.setattr(library, "MlflowClient", lambda: client, raising=False)
    for name in ("Param", "Metric"):
        monkeypatch.setattr(entities, name, lambda *values: values, raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", library)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    return client


def test_a_server_hears_each_round_and_the_end(run_config: dict[str, Any], mlflow: MagicMock) -> None:
    run = play(run_config | {"rounds": 3, "restarts": 1}, observers=[MLflow()])
    first, *rounds = [call.kwargs for call in mlflow.log_batch.call_args_list]
    assert ("strategy", "group-privacy") in first["params"]
    steps = [{step for *_, step in one["metrics"]} for one in rounds]
    assert steps == [{entry.number} for entry in run.state.history] + [{run.state.history[-1].number}]
    assert {name for name, *_ in rounds[-1]["metrics"]} == {"paper_budget"}
    assert mlflow.set_tag.call_args.args[1:] == ("umbel.stopped", "all 3 rounds done")


@pytest.mark.rest
@pytest.mark.skipif(not (URI and find_spec("mlflow")), reason="there is no MLflow, or MLFLOW_TRACKING_URI names none")
def test_a_run_and_what_is_added_to_it_is_one_run_on_the_server(
    run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "umbel-tests")
    run = with_two_more_rounds(run_config | {"restarts": 1, "observers": "mlflow"})
    server = MlflowClient(URI)
    experiment = server.get_experiment_by_name("umbel-tests")
    assert experiment is not None
    (there,) = server.search_runs([experiment.experiment_id], f"tags.`umbel.run` = '{run.folder.name}'")
    try:
        assert (there.info.status, there.info.run_name) == ("FINISHED", run.folder.name)
        assert there.data.params["strategy"] == "group-privacy"
        assert there.data.tags["umbel.stopped"] == "all 4 rounds done"
        losses = {one.step: one.value for one in server.get_metric_history(there.info.run_id, "validation_loss")}
        assert losses == {entry["number"]: pytest.approx(entry["loss"]) for entry in run.history}
    finally:
        server.delete_run(there.info.run_id)
