"""Runs in MLflow; ``mlflow-skinny``, its client alone, is enough."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from umbel.protocol.errors import ConfigError
from umbel.server.observer import Run
from umbel.server.tracking.tracker import Tracker, Values

_NAME = "umbel.run"
_AT_ONCE = 900  # metrics; a server takes no more than 1,000 in a message
_PARAMETERS = 90  # and no more than 100 of these


@dataclass(frozen=True)
class MLflowOptions:
    """Where runs go.

    Attributes
    ----------
    uri : str
        Of the tracking server; by default that of ``MLFLOW_TRACKING_URI``.
    experiment : str
        Made where there is none of that name.
    """

    uri: str = ""
    experiment: str = "umbel"


class MLflow(Tracker):
    """Tells an MLflow server; a run that goes on after an interruption stays one run there."""

    tool = "MLflow"
    Options = MLflowOptions
    options: MLflowOptions

    def open(self, run: Run, told: Mapping[str, Any]) -> None:
        """Make a run, or find the one of this name."""
        uri = self.options.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            # Its own default is a file in the working directory, which of a Flower App is not the user's.
            raise ConfigError(
                'track = "mlflow": where? Set track-options = "uri=http://HOST:5000", or MLFLOW_TRACKING_URI',
                code="config.track-options",
            )
        if urlsplit(self.options.uri).password:
            raise ConfigError(
                "track-options: reports show the run config, so keep the password out of the uri; "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
                code="config.track-password",
            )
        # It tells its makers of its use otherwise. A server that is gone should not hold up a run for minutes.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(self.options.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self.options.experiment)
        same = self._client.search_runs([experiment], f"tags.`{_NAME}` = '{run.name}'") if run.name else []
        if same:
            self._run = same[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return  # what was set is on record, and cannot be set again
        tags = {_NAME: run.name} if run.name else {}
        self._run = self._client.create_run(experiment, tags=tags, run_name=run.name or None).info.run_id
        parameters = [Param(name, str(value)) for name, value in told.items()]
        for start in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + _PARAMETERS])

    def send(self, rounds: Sequence[tuple[int, Values]]) -> None:
        """Send the values of rounds, as many as fit into a message at once."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for step, values in rounds for name, value in values.items()]
        for start in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + _AT_ONCE])

    def close(self, stopped: str) -> None:
        """Say why the run ended."""
        self._client.set_tag(self._run, "umbel.stopped", stopped)
        self._client.set_terminated(self._run)
