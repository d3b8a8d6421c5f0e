"""MLflow: what a real server has on record, read back through its API.

mlflow server --port 5000 &
MLFLOW_TRACKING_URI=http://127.0.0.1:5000 pytest tests/server/tracking/test_mlflow.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest

import umbel.client.app
from tests.helpers.errors import raises
from tests.helpers.runs import run_app
from umbel.protocol.errors import ConfigError
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import play

pytest.importorskip("mlflow", reason="MLflow is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("blank_figures")]
URI = os.environ.get("MLFLOW_TRACKING_URI", "")


@pytest.mark.skipif(not URI, reason="MLFLOW_TRACKING_URI names no server")
def test_a_run_and_what_is_added_to_it_is_one_run_on_the_server(run_config: dict[str, Any]) -> None:
    from mlflow import MlflowClient

    config = run_config | {"rounds": 2, "restarts": 1, "track": "mlflow", "track-options": "experiment=umbel-tests"}
    run = run_app(config, InProcessGrid(umbel.client.app.app, config))
    longer = config | {"rounds": 4, "resume": run.folder.name}
    run = run_app(longer, InProcessGrid(umbel.client.app.app, longer))

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


def test_it_must_be_said_where(run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with raises(ConfigError, "config.track-options", "track-options", "uri="):
        play(run_config | {"rounds": 1, "restarts": 1, "track": "mlflow"})


def test_a_password_does_not_get_into_reports(run_config: dict[str, Any]) -> None:
    options = {"track": "mlflow", "track-options": "uri=http://me:secret@127.0.0.1:9"}
    with raises(ConfigError, "config.track-password", "MLFLOW_TRACKING_USERNAME"):
        play(run_config | {"rounds": 1, "restarts": 1, **options})
