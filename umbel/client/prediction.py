"""Use a run's result: a client that never took part picks its best hypothesis and predicts with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import safetensors.numpy
import torch
from numpy.typing import NDArray

from umbel import models
from umbel.client.cohort import Cohort
from umbel.client.learner import best_hypothesis
from umbel.client.trial import try_out
from umbel.data import Dataset
from umbel.models.fit import misfit
from umbel.models.model import Model
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import DatasetError
from umbel.protocol.run_config import RunConfig, read_saved

_NO_STEP = 1.0  # of what is local, only statistics of rows are left, and no step is made


@dataclass(frozen=True)
class Prediction:
    """What a client is told."""

    client: int
    hypothesis: int  # the one that fits the client's labelled rows best
    metric: float  # of that hypothesis on them, as the model reports it
    outputs: NDArray[Any]  # (rows,) or (rows, outputs): classes, or numbers as they are stored


def predictions(
    model: Model, hypotheses: Arrays, dataset: Dataset, clients: list[int], features: NDArray[np.float32] | None = None
) -> Iterator[Prediction]:
    """Yield what each client predicts with its best hypothesis.

    It predicts for rows without labels (rows, \\*feature shape), scaled as those of the dataset, which has its labelled
    rows; by default for these. Hypotheses are (k, \\*shape) each.
    """
    learner = try_out(model, dataset)
    for client in clients:
        cohort = Cohort.gather(dataset, [client], learner.device)
        fresh = model.initial_local([np.random.default_rng(0)])
        losses, metrics = (
            learner.score_newcomers(hypotheses, cohort, fresh, _NO_STEP) if fresh else learner.score(hypotheses, cohort)
        )
        chosen = int(best_hypothesis(losses)[0])
        inputs = cohort.features
        if features is not None:
            inputs = torch.from_numpy(features * np.float32(dataset.manifest.feature_scale))
        best = {name: value[chosen : chosen + 1] for name, value in hypotheses.items()}
        parameters = best | (learner.fit_local(best, cohort, fresh, _NO_STEP) if fresh else {})
        outputs = learner.outputs({name: value[0] for name, value in parameters.items()}, inputs)
        if model.metric.name == "accuracy":
            outputs = outputs.argmax(-1)
        elif outputs.shape[-1] == 1:
            outputs = outputs[:, 0]
        yield Prediction(client, chosen, float(metrics[chosen, 0]), outputs.cpu().numpy())


def read_run(run: Path, data: Dataset) -> tuple[Model, Arrays]:
    """Return the model and the best hypotheses of a run; `DatasetError` where they are missing or do not fit."""
    for file in ("config.toml", "hypotheses.safetensors"):
        if not (run / file).is_file():
            raise DatasetError(f"{run / file} is missing; give the folder of one run", code="data.missing-file")
    config = read_saved((run / "config.toml").read_text(encoding="utf-8"))["config"]
    hypotheses = safetensors.numpy.load_file(run / "hypotheses.safetensors")
    # A run that names no model took that of its dataset, which a newcomer need not have: then the newcomer's own data
    # name it, and the shapes tell whether it is the same.
    model = models.load_for(RunConfig.parse(config), data.manifest)
    # In the order of the model's state dict, which a file does not keep.
    shapes = {name: value.shape[1:] for name, value in hypotheses.items()}
    if shapes != model.shapes:
        text = f"{run}: hypotheses of shapes {shapes} do not fit model {model.name!r}: {model.shapes}"
        raise DatasetError(text, code="data.unfit-hypotheses")
    if reason := misfit(model, data):
        raise DatasetError(f"{data.manifest.name}: model {model.name!r} {reason}", code="data.unfit-model")
    # Statistics of its rows a newcomer can take; parameters that are trained it lacks.
    if own := ", ".join(name for name in model.local_shapes if name not in model.buffers):
        text = f"{run}: parameters {own} of model {model.name!r} are each client's own, and none has any"
        raise DatasetError(text, code="data.local-parameters")
    return model, {name: hypotheses[name] for name in model.shapes}


def read_features(path: Path, data: Dataset) -> NDArray[np.float32]:
    """Read rows without labels to predict for, from a .npy file."""
    features = np.load(path, allow_pickle=False)
    if not isinstance(features, np.ndarray):
        raise DatasetError(f"{path} holds several arrays; save the rows as one .npy", code="data.several-arrays")
    if features.shape[1:] != data.features.shape[1:]:
        text = f"{path}: rows of shape {features.shape[1:]}, the data's are {data.features.shape[1:]}"
        raise DatasetError(text, code="data.unfit-rows")
    return features.astype(np.float32)


def table(made: list[Prediction], data: Dataset, with_targets: bool = True) -> pd.DataFrame:
    """Return a row for each prediction, in the target's unit: client, row, hypothesis, prediction, and target.

    Clients' names stand beside their numbers. Categories go by their names. Several outputs of a model are an array.
    """
    target = data.manifest.units.get("target", {})
    scale, names = float(target.get("scale", 1.0)), target.get("categories", [])

    def shown(values: NDArray[Any]) -> list[Any]:
        if names and values.ndim == 1:
            # A class is its place; a label of -1 or 1, or a score for it, is told by its sign.
            places = values if np.issubdtype(values.dtype, np.integer) else np.sign(values)
            return [names[place] for place in np.maximum(places, 0).astype(np.int64)]
        if np.issubdtype(values.dtype, np.integer):
            return list(values.tolist())
        return list(values * scale) if values.ndim > 1 else (values * scale).tolist()

    frames = []
    for one in made:
        count = len(one.outputs)
        columns = {
            "client": [one.client] * count,
            **({"name": [data.names[one.client]] * count} if data.names else {}),
            "row": range(count),
            "hypothesis": [one.hypothesis] * count,
            "prediction": shown(one.outputs),
        }
        if with_targets:
            columns["target"] = shown(np.asarray(data.client(one.client)[1]))
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def mean_metric(made: list[Prediction], model: Model, data: Dataset) -> tuple[float, str]:
    """Return the mean of the clients' metric on their labelled rows, and the unit that it is in."""
    target = data.manifest.units.get("target", {}) if model.metric.name == "rmse" else {}
    mean = float(np.mean([one.metric for one in made])) * float(target.get("scale", 1.0))
    return mean, str(target.get("unit", ""))
