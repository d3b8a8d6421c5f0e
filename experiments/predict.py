"""Use a run's result: a client that never took part picks its best hypothesis and predicts."""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
import typer
from numpy.typing import NDArray

import models
from client.cohort import Cohort
from client.learner import best_hypothesis, learner_for
from federation import Federation, find_federation, open_federation
from models.fit import misfit
from models.model import Model
from protocol.arrays import Arrays
from protocol.cli import errors_in_one_line
from protocol.errors import FederationError
from protocol.home import write_atomically
from protocol.run_config import RunConfig


@dataclass(frozen=True)
class Prediction:
    """What a client is told.

    Attributes
    ----------
    client : int
    hypothesis : int
        The one that fits the client's labelled rows best.
    metric : float
        Of that hypothesis on them, as the model reports it.
    outputs : ndarray, shape (rows,) or (rows, outputs)
        Classes, or numbers as they are stored, for the rows asked for.
    """

    client: int
    hypothesis: int
    metric: float
    outputs: NDArray[Any]


def predictions(
    model: Model,
    hypotheses: Arrays,
    federation: Federation,
    clients: list[int],
    features: NDArray[np.float32] | None = None,
) -> Iterator[Prediction]:
    """Yield what each client predicts with its best hypothesis.

    Parameters
    ----------
    model : Model
    hypotheses : dict of ndarray, each (k, \\*shape)
    federation : Federation
        The clients' labelled rows.
    clients : list of int
    features : ndarray, shape (rows, \\*feature shape), optional
        Rows without labels to predict for, scaled as the federation's; by default the clients' own.
    """
    learner = learner_for(model)
    device = learner.device
    for client in clients:
        cohort = Cohort.gather(federation, [client], device)
        losses, metrics = learner.score(hypotheses, cohort)
        chosen = int(best_hypothesis(losses)[0])
        inputs = cohort.features
        if features is not None:
            inputs = torch.from_numpy(features * np.float32(federation.manifest.feature_scale)).to(device)
        parameters = {name: torch.from_numpy(value[chosen]).to(device) for name, value in hypotheses.items()}
        with torch.inference_mode():
            outputs = model.apply(parameters, inputs)
        if model.metric.name == "accuracy":
            outputs = outputs.argmax(-1)
        elif outputs.shape[-1] == 1:
            outputs = outputs[:, 0]
        yield Prediction(client, chosen, float(metrics[chosen, 0]), outputs.cpu().numpy())


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    federation: Annotated[str, typer.Argument(help="The newcomer's labelled data: a federation's name or path.")],
    client: Annotated[int | None, typer.Option(min=0, help="One client alone.", show_default="all")] = None,
    features: Annotated[
        Path | None, typer.Option(help="Rows without labels (.npy) to predict for.", show_default="the client's own")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write.", show_default="standard output")] = None,
) -> None:
    """Let clients that took no part in a run pick their best hypothesis and predict with it."""
    with errors_in_one_line(ValueError, safetensors.SafetensorError):
        data = open_federation(
            find_federation(str(Path(federation).absolute()) if Path(federation).exists() else federation)
        )
        model, hypotheses = read_run(run, data)
        rows = None if features is None else _read_features(features, data)
        count = data.manifest.clients
        if client is not None and client >= count:
            raise FederationError(f"{federation} has the clients 0 to {count - 1}, not {client}")
        clients = list(range(count)) if client is None else [client]
        if out is not None and not out.expanduser().absolute().parent.is_dir():
            raise FederationError(f"{out} cannot be written: its folder is missing; make it first")
        made = list(predictions(model, hypotheses, data, clients, rows))
    table = _table(made, data, with_targets=rows is None)
    if out is None:
        typer.echo(table, nl=False)
    else:
        write_atomically(out.expanduser().absolute(), table.encode())
    target = data.manifest.units.get("target", {}) if model.metric.name == "rmse" else {}
    metric = np.mean([one.metric for one in made]) * float(target.get("scale", 1.0))
    shown = f"{metric:.4g} {target.get('unit', '')}".strip()
    typer.echo(f"{len(made)} clients, mean {model.metric.name} on their labelled rows: {shown}", err=True)


def read_run(run: Path, data: Federation) -> tuple[Model, Arrays]:
    """Return the model and the best hypotheses of a run, checked against the data that they are to be used on.

    Raises
    ------
    FederationError
        When the folder holds no run, or its model does not take the data.
    """
    for file in ("config.toml", "hypotheses.safetensors"):
        if not (run / file).is_file():
            raise FederationError(f"{run / file} is missing; give the folder of one run")
    config = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["config"]
    hypotheses = safetensors.numpy.load_file(run / "hypotheses.safetensors")
    # A run that names no model took that of its federation, which a newcomer need not have: then
    # the newcomer's own data name it, and the shapes tell whether it is the same.
    manifest = data.manifest
    model = models.load_for(RunConfig.parse(config), data.manifest)
    # In the order of the model's state dict, which a file does not keep.
    shapes = {name: value.shape[1:] for name, value in hypotheses.items()}
    if shapes != model.shapes:
        raise FederationError(f"{run}: hypotheses of shapes {shapes} do not fit model {model.name!r}: {model.shapes}")
    if reason := misfit(model, data):
        raise FederationError(f"{manifest.name}: model {model.name!r} {reason}")
    if model.local_shapes:
        own = ", ".join(model.local_shapes)
        raise FederationError(
            f"{run}: parameters {own} of model {model.name!r} are each client's own, and none has any"
        )
    return model, {name: hypotheses[name] for name in model.shapes}


def _read_features(path: Path, data: Federation) -> NDArray[np.float32]:
    features = np.load(path, allow_pickle=False)
    if not isinstance(features, np.ndarray):
        raise FederationError(f"{path} holds several arrays; save the rows as one .npy")
    if features.shape[1:] != data.features.shape[1:]:
        raise FederationError(f"{path}: rows of shape {features.shape[1:]}, the data's are {data.features.shape[1:]}")
    return features.astype(np.float32)


def _table(made: list[Prediction], data: Federation, with_targets: bool) -> str:
    """Return predictions as CSV, in the target's unit."""
    scale = float(data.manifest.units.get("target", {}).get("scale", 1.0))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["client", "row", "hypothesis", "prediction"] + ["target"] * with_targets)

    def text(value: Any) -> str:
        if np.issubdtype(np.asarray(value).dtype, np.integer):
            return str(value)
        return " ".join(f"{x * scale:.6g}" for x in np.atleast_1d(value))

    for one in made:
        targets = data.client(one.client)[1]
        for row, output in enumerate(one.outputs):
            shown = [text(targets[row])] if with_targets else []
            writer.writerow([one.client, row, one.hypothesis, text(output), *shown])
    return buffer.getvalue()
