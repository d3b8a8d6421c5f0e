"""Callbacks that follow a run in a tool: ``mlflow`` or ``tensorboard`` among the run config's ``observers``.

They tell nothing beyond the run's folder: for each round its seconds, validation losses in the target's unit if there
is one, and releases; at the end its guarantees. Only this machine says to whom: TensorBoard's events lie in the run's
folder, and MLflow's environment variables name a server and an experiment.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from logging import WARNING
from typing import Any

from umbel.protocol.errors import ConfigError
from umbel.protocol.log import log
from umbel.protocol.project import to_install
from umbel.server.history import Round
from umbel.server.run import Run
from umbel.server.summary import Summary
from umbel.strategies import Callback

_RUN = "umbel.run"


def settings(run: Run) -> dict[str, Any]:
    """Return the run config, the number of parameters, and the unit of losses."""
    unit = Summary.of(run.setup).scale[1]
    given = {**run.setup.config.entries(), "parameters": run.setup.model.num_parameters}
    return given | {"validation_loss_unit": unit} if unit else given


def figures(run: Run, entry: Round) -> dict[str, float]:
    """Return the figures of a round."""
    summary = Summary.of(run.setup)
    values: dict[str, float] = {"seconds": entry.seconds}
    if entry.loss is not None and entry.metric is not None:
        values["validation_loss"] = entry.loss * summary.factor
        values["best_validation_loss"] = run.state.best_loss * summary.factor
        values[f"validation_{summary.model.metric.name}"] = entry.metric * summary.metric_factor
    if spread := entry.loss_spread:
        values["validation_loss_p10"] = spread[0] * summary.factor
        values["validation_loss_p90"] = spread[-1] * summary.factor
    if entry.asked:
        values |= {"asked": entry.asked, "releases": entry.releases, "lost_nodes": entry.lost_nodes}
        values["max_participations"] = entry.max_participations
    return {name: value for name, value in values.items() if math.isfinite(value)}  # not every tool takes others


def spent(run: Run) -> dict[str, float]:
    """Return the run's guarantees to a client and to a row, and the busiest client's part of the paper's budget."""
    summary, times = Summary.of(run.setup), int(run.state.history[-1].max_participations)
    left = summary.left(run.state.history)
    bounds = {"epsilon": summary.of_client(times, left), "row_epsilon": summary.of_row(times, left)}
    values = {name: float(bound.epsilon) for name, bound in bounds.items() if bound and math.isfinite(bound.epsilon)}
    if summary.release.paper_cost is not None:
        values["paper_budget"] = float(summary.release.paper_spend(times))
    return values


class Tracker(Callback):
    """Hands the figures of each complete round to a tool, and at the end what was spent."""

    run: Run

    def after_exchange(self, round: int, stages: dict[str, float]) -> None:
        """Hand over the rounds that are complete now."""
        for entry in self.run.complete:
            self._write(entry.number, figures(self.run, entry))

    def at_end(self) -> None:
        """Hand over what was spent, and why the run ended."""
        self.after_exchange(0, {})
        self._write(self.run.state.history[-1].number, spent(self.run), self.run.state.stopped)

    def _write(self, round: int, values: Mapping[str, float], stopped: str = "") -> None:
        raise NotImplementedError


class TensorBoard(Tracker):
    """Writes events into the run's folder; repeated rounds of a resumed run replace the earlier ones."""

    def begin(self) -> None:
        """Open the file, and write the settings."""
        from torch.utils.tensorboard import SummaryWriter

        if self.run.folder is None:
            text = "observers: tensorboard writes into the run's folder, and this run leaves none; leave it out"
            raise ConfigError(text, code="config.track-where")
        folder = str(self.run.folder.path / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=self.run.state.history[-1].number)
        rows = "\n".join(f"| {name} | {value} |" for name, value in settings(self.run).items())
        self._writer.add_text("run config", f"| key | value |\n|---|---|\n{rows}")

    def _write(self, round: int, values: Mapping[str, float], stopped: str = "") -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()
        if stopped:
            self._writer.add_text("stopped", stopped)
            self._writer.close()


class MLflow(Tracker):
    """Logs to an MLflow server, where a resumed run stays one run. ``mlflow-skinny``, MLflow's client, is enough.

    A server that fails later ends no run: umbel warns once, and continues without it.
    """

    _failed = False

    def begin(self) -> None:
        """Make a run with the settings, or find the one of this name."""
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            # MLflow's default is a file in the working directory, which in a Flower app is not the user's.
            text = "observers: mlflow needs a server: set MLFLOW_TRACKING_URI=http://HOST:5000"
            raise ConfigError(text, code="config.track-where")
        # Without telemetry; and a server that cannot be reached should not delay a run for minutes.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        run, experiment_name = self.run, os.environ.get("MLFLOW_EXPERIMENT_NAME", "umbel")
        self._client = client = MlflowClient()
        try:
            there = client.get_experiment_by_name(experiment_name)
            experiment = there.experiment_id if there else client.create_experiment(experiment_name)
            same = client.search_runs([experiment], f"tags.`{_RUN}` = '{run.name}'") if run.name else []
            if same:
                self._id = same[0].info.run_id
                client.update_run(self._id, status="RUNNING")
                return  # its parameters cannot be set again
            self._id = client.create_run(experiment, tags={_RUN: run.name}, run_name=run.name).info.run_id
            client.log_batch(self._id, params=[Param(key, str(value)) for key, value in settings(run).items()])
        except Exception as error:
            text = f"observers: MLflow does not work: {_first_line(error)}; repair that, or leave it out"
            raise ConfigError(text, code="config.track-failed") from error

    def _write(self, round: int, values: Mapping[str, float], stopped: str = "") -> None:
        from mlflow.entities import Metric

        if self._failed:
            return
        now = int(time.time() * 1000)
        try:
            metrics = [Metric(name, float(value), now, round) for name, value in values.items()]
            self._client.log_batch(self._id, metrics=metrics)
            if stopped:
                self._client.set_tag(self._id, "umbel.stopped", stopped)
                self._client.set_terminated(self._id)
        except Exception as error:
            self._failed = True
            log(WARNING, "observers: MLflow failed, and the run continues without it: %s", _first_line(error))


TRACKERS: Mapping[str, type[Tracker]] = {"mlflow": MLflow, "tensorboard": TensorBoard}
"""By name, which is also that of the library's module, and of the extra that installs it."""


def load_tracker(name: str) -> Tracker:
    """Return a tracker by name. Raise `ConfigError` if its library is missing."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:  # a folder of that name is no library
        text = f"observers: {name} needs a library that is not installed: pip install {to_install(name)}"
        raise ConfigError(text, code="config.missing-library")
    return TRACKERS[name]()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
