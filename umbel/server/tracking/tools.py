"""The supported experiment trackers. Each library is imported when a run opens it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from umbel.protocol.errors import ConfigError
from umbel.server.observer import Run
from umbel.server.tracking.tracker import Tracker, Values

_NAME = "umbel.run"
_AT_ONCE = 900  # metrics in a message; a server accepts at most 1,000
_PARAMETERS = 90  # parameters in a message; a server accepts at most 100


@dataclass(frozen=True)
class MLflowOptions:
    """Destination of runs.

    Attributes
    ----------
    uri : str
        Address of the tracking server; by default ``MLFLOW_TRACKING_URI``.
    experiment : str
        Made if it does not exist.
    """

    uri: str = ""
    experiment: str = "umbel"


class MLflow(Tracker):
    """Logs to an MLflow server; a resumed run stays one run there.

    ``mlflow-skinny``, only its client, suffices.
    """

    tool = "MLflow"
    Options = MLflowOptions
    options: MLflowOptions

    def open(self, run: Run, told: Mapping[str, Any]) -> None:
        """Make a run, or find the one of this name."""
        uri = self.options.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            # MLflow's default is a file in the working directory, which in a Flower app is not the user's.
            raise ConfigError(
                'track = "mlflow" needs a server; set track = "mlflow uri=http://HOST:5000", or MLFLOW_TRACKING_URI',
                code="config.track",
            )
        if urlsplit(self.options.uri).password:
            raise ConfigError(
                "track: reports show the run config, so keep the password out of the uri; "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
                code="config.track-password",
            )
        # Turn off MLflow's telemetry. An unreachable server should not delay a run for minutes.
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
            return  # parameters are already recorded, and cannot be set again
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


@dataclass(frozen=True)
class TensorBoardOptions:
    """Destination of event files.

    Attributes
    ----------
    folder : str
        Contains a folder for each run; by default ``tensorboard`` in the run's own folder.
    """

    folder: str = ""


class TensorBoard(Tracker):
    """Writes an event file; repeated rounds of a resumed run replace the earlier ones."""

    tool = "TensorBoard"
    Options = TensorBoardOptions
    options: TensorBoardOptions

    def open(self, run: Run, told: Mapping[str, Any]) -> None:
        """Open the event file, and write the settings."""
        from torch.utils.tensorboard import SummaryWriter

        if self.options.folder:
            given = Path(self.options.folder).expanduser()
            if not given.is_absolute():
                raise ConfigError(
                    f"track: folder must be an absolute path, got {self.options.folder!r}",
                    code="config.track",
                )
            folder = given / run.name
        elif run.folder is not None:
            folder = run.folder.path / "tensorboard"
        else:
            raise ConfigError(
                'track = "tensorboard": this run leaves no folder; set track = "tensorboard folder=/PATH"',
                code="config.track",
            )
        self._writer = SummaryWriter(str(folder), purge_step=len(run.state.history) + 1)
        rows = "\n".join(f"| {name} | {value} |" for name, value in told.items())
        self._writer.add_text("run config", f"| key | value |\n|---|---|\n{rows}")

    def send(self, rounds: Sequence[tuple[int, Values]]) -> None:
        """Write the values of rounds."""
        for step, values in rounds:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, stopped: str) -> None:
        """Say why the run ended."""
        self._writer.add_text("stopped", stopped)
        self._writer.close()


@dataclass(frozen=True)
class WandBOptions:
    """Destination of runs; wandb's own environment variables set the rest.

    Attributes
    ----------
    project : str
    """

    project: str = "umbel"


class WandB(Tracker):
    """Logs the run to Weights & Biases, without information about machine, code or output.

    On its servers or, with ``WANDB_MODE=offline``, in the run's folder.
    """

    tool = "Weights & Biases"
    Options = WandBOptions
    options: WandBOptions

    def open(self, run: Run, told: Mapping[str, Any]) -> None:
        """Make a run, or resume the one of this name."""
        import wandb

        self._run = wandb.init(
            project=self.options.project,
            id=run.name or None,
            name=run.name or None,
            resume="allow" if run.name else None,
            dir=str(run.folder.path) if run.folder is not None else None,
            config=dict(told),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_job_creation=True, save_code=False,
                x_disable_machine_info=True, x_disable_meta=True, x_disable_stats=True, x_save_requirements=False,
            ),
        )  # fmt: skip

    def send(self, rounds: Sequence[tuple[int, Values]]) -> None:
        """Send the values of rounds."""
        for step, values in rounds:
            self._run.log(dict(values), step=step)

    def close(self, stopped: str) -> None:
        """Say why the run ended."""
        self._run.summary["stopped"] = stopped
        self._run.finish()
