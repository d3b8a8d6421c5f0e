"""Use a run's result: clients personalise hypotheses with their labelled rows, and predict. Nothing is released."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from torch import Tensor

from umbel import models
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner, arrays_of, best_hypothesis
from umbel.client.personal import Predictors, Task, method
from umbel.client.trial import try_out
from umbel.data import Dataset, Manifest
from umbel.data.data import encoded_alike
from umbel.data.files import read_manifest_of_run
from umbel.models.fit import misfit, traits_of
from umbel.models.losses import PROBABLE, of_classes
from umbel.models.model import Model
from umbel.models.optimizers import descent_of
from umbel.models.prior import Prior
from umbel.privacy.mechanisms.randomness import streams
from umbel.privacy.site.policy import Personal
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ConfigError, DatasetError
from umbel.protocol.run_config import RunConfig, read_saved
from umbel.protocol.words import count_of

if TYPE_CHECKING:
    import pandas as pd


DEFAULT = Personal.AUTO
"""The default personalisation."""

_TABLES = (".csv", ".csv.gz", ".csv.zip", ".tsv", ".parquet", ".pq")
_MOST_NAMED = 20  # clients that an error lists
_NO_STEP = 1.0  # step size where only statistics of rows are local, so that no step is made
_EPOCHS = 10  # of a client's further training, if its method trains
_NUMBERS_AT_ONCE, _CLIENTS_AT_ONCE = 1 << 24, 256  # of hypotheses; a method may hold several times as many networks


@dataclass(frozen=True)
class Learnt:
    r"""The result of a run.

    Attributes
    ----------
    model : Model
    hypotheses : dict of ndarray, each (k, \*shape)
    config : RunConfig
    prior : Prior, optional
        The differences of clients around each hypothesis, if the server has estimated them from releases.
    """

    model: Model
    hypotheses: Arrays
    config: RunConfig
    prior: Prior | None = None

    @property
    def count(self) -> int:
        """Number of hypotheses."""
        return len(next(iter(self.hypotheses.values())))

    def personalise(self, learner: Learner, support: Cohort, clients: Sequence[int], how: str) -> Predictors:
        """Return clients' own predictors, from their labelled rows; for a model without local parameters."""
        run = self.config
        update = LocalUpdate(_EPOCHS, run.step_size, run.batch_size, descent=descent_of(run.optimizer))
        draws = partial(streams, run.seed, "shuffle", 0, clients)
        return method(how)(Task(learner, self.hypotheses, support, update, draws, self.prior))

    def predictor_of(self, dataset: Dataset, client: int, how: str = DEFAULT) -> Predictors:
        """Return the own predictor of a client of a dataset; for a model without local parameters."""
        learner = try_out(self.model, dataset)
        return self.personalise(learner, Cohort.gather(dataset, [client], learner.device), [client], how)

    def chunks(self, clients: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield as many clients at a time as there is memory for networks."""
        size = min(_CLIENTS_AT_ONCE, max(1, _NUMBERS_AT_ONCE // (self.count * self.model.num_parameters)))
        for begin in range(0, len(clients), size):
            yield clients[begin : begin + size]


@dataclass(frozen=True)
class Predicted:
    """Predictions of clients.

    Attributes
    ----------
    rows : DataFrame
        One row for each prediction.
    notes : list of str
        Facts about the prediction, as sentences.
    warning : str
        Names of clients without a labelled row; empty if there are none.
    """

    rows: pd.DataFrame
    notes: list[str]
    warning: str = ""


@dataclass(frozen=True)
class Prediction:
    """A client's prediction."""

    client: int
    hypothesis: int  # the one that fits the client's labelled rows best
    metric: float  # of the predictor on them, as the model reports it
    outputs: Tensor  # (rows, *output shape), as the model gives them


def is_table(name: str | Path) -> bool:
    """Return whether a name or path is a table's, and not a dataset's."""
    path = Path(name).expanduser()
    return path.name.lower().endswith(_TABLES) or (path.is_file() and path.suffix.lower() != ".json")


def predict_dataset(learnt: Learnt, data: Dataset, clients: Sequence[int], how: str = DEFAULT) -> Predicted:
    """Return the predictions of clients of a dataset for their labelled rows, in the target's unit.

    Their columns are client, its name if it has one, row, hypothesis, prediction, its `probability` if there is one,
    and target. Categories appear by name. Several outputs of a model are an array.
    """
    import pandas as pd  # the import takes half a second

    made, frames, said = list(predictions(learnt, data, clients, how)), [], list[str]()
    for prediction in made:
        client, count = prediction.client, len(prediction.outputs)
        chances, said = probability(learnt.model, prediction.outputs, data.manifest)
        columns = {
            "client": [client] * count,
            **({"name": [data.names[client]] * count} if data.names else {}),
            "row": range(count),
            "hypothesis": [prediction.hypothesis] * count,
            "prediction": present_outputs(learnt.model, prediction.outputs, data.manifest),
            **chances,
            "target": present(np.asarray(data.client(client)[1]), data.manifest),
        }
        frames.append(pd.DataFrame(columns))
    error = in_unit(float(np.mean([prediction.metric for prediction in made])), learnt.model, data.manifest)
    note = f"Mean over {count_of(len(made), 'client')}, on the labelled rows that chose their predictors: {error}"
    return Predicted(pd.concat(frames, ignore_index=True), [note, *said])


def predictions(learnt: Learnt, dataset: Dataset, clients: Sequence[int], how: str = DEFAULT) -> Iterator[Prediction]:
    """Yield clients' predictions for their labelled rows in a dataset, with predictors made from these."""
    learner = try_out(learnt.model, dataset)
    for some in learnt.chunks(clients):
        support = Cohort.gather(dataset, some, learner.device)
        yield from predicted(learnt, learner, some, support, support, how)


def predicted(
    learnt: Learnt, learner: Learner, clients: Sequence[int], support: Cohort, asked: Cohort, how: str
) -> Iterator[Prediction]:
    """Yield each client's prediction for the rows asked for, with a predictor made from those of `support`.

    A client's number seeds the order of its rows in training.
    """
    if not learnt.model.local_shapes:
        chosen = best_hypothesis(learner.score(learner.tensors(learnt.hypotheses), support)[0])
        own = learnt.personalise(learner, support, clients, how)
        metrics = own.score(learner, support)[1]
    elif how in (DEFAULT, Personal.NO):
        chosen, metrics, own = _newcomers(learnt, learner, support)
    else:
        text = f"{how} would do nothing: model {learnt.model.name!r} already has local parameters for each client"
        raise ConfigError(f"{text}; leave personalise out", code="config.personalise")
    outputs = own.outputs(learner, asked).cpu().split(asked.lengths.tolist())
    return map(Prediction, clients, chosen.tolist(), metrics.tolist(), outputs)


def _newcomers(
    learnt: Learnt, learner: Learner, support: Cohort
) -> tuple[NDArray[np.int64], NDArray[np.float64], Predictors]:
    """Return each client's best hypothesis, its metric, and the predictor that its rows' statistics complete."""
    hypotheses, chosen, metrics, networks = learner.tensors(learnt.hypotheses), [], [], []
    fresh = learner.tensors(learnt.model.initial_local([np.random.default_rng(0)]))
    for rows in map(support.part, (slice(c, c + 1) for c in range(len(support)))):
        losses, scores = learner.score_newcomers(hypotheses, rows, fresh, _NO_STEP)
        best = int(best_hypothesis(losses)[0])
        chosen.append(best)
        metrics.append(scores[best, 0])
        one = {name: value[best : best + 1] for name, value in hypotheses.items()}
        networks.append(arrays_of(one | learner.fit_local(one, rows, fresh, _NO_STEP)))
    joined = {name: np.stack([network[name] for network in networks]) for name in networks[0]}
    outputs = traits_of(learnt.model, support.shape).outputs[-1]
    return np.array(chosen), np.array(metrics), Predictors.plain(joined, outputs)


def check_encoding(run: Path, data: Dataset) -> None:
    """Raise `DatasetError` if the data have other columns or scales than a run's dataset had."""
    described = read_manifest_of_run(run)
    if described and not encoded_alike(described, data.manifest):
        text = f"{data.manifest.name} has other columns or scales than the dataset of {run.name} had"
        fix = "run again with it, or import it with the former ones under another name"
        raise DatasetError(f"{text}; {fix}", code="data.unfit-rows")


def read_run(run: Path, data: Dataset, prior: Prior | None = None) -> Learnt:
    """Return a run's result; raise `DatasetError` if it is missing or does not fit the data, or `ConfigError` if it
    does not fit the model's frozen parameters."""
    for file in ("config.toml", "hypotheses.safetensors"):
        if not (run / file).is_file():
            raise DatasetError(f"{run / file} is missing; give the folder of one run", code="data.missing-file")
    check_encoding(run, data)
    saved = read_saved((run / "config.toml").read_text(encoding="utf-8"))
    config = RunConfig.parse(saved["config"])
    hypotheses = safetensors.numpy.load_file(run / "hypotheses.safetensors")
    # A run without a model used its dataset's, which a newcomer need not have. Then the newcomer's own data name it,
    # and the shapes show whether it is the same.
    model = models.load_for(config, data.manifest)
    # In the order of the model's state dict; a file does not keep the order.
    shapes = {name: value.shape[1:] for name, value in hypotheses.items()}
    if shapes != model.shapes:
        text = f"{run}: hypotheses of shapes {shapes} do not fit model {model.name!r}: {model.shapes}"
        raise DatasetError(text, code="data.unfit-hypotheses")
    model.check_frozen(saved, run)
    if reason := misfit(model, data):
        raise DatasetError(f"{data.manifest.name}: model {model.name!r} {reason}", code="data.unfit-model")
    # A newcomer can compute statistics of its rows, but it lacks trained parameters.
    if own := ", ".join(name for name in model.local_shapes if name not in model.buffers):
        text = f"{run}: parameters {own} of model {model.name!r} are local to each client, and a new client has none"
        raise DatasetError(text, code="data.local-parameters")
    return Learnt(model, {name: hypotheses[name] for name in model.shapes}, config, prior)


def client_in(data: Dataset, client: int | str) -> int:
    """Return the number of a client from its name or number; where a client's name is a number, only from its name."""
    names, count = list(data.names), data.manifest.clients
    if str(client) in names:
        return names.index(str(client))
    number = int(client) if str(client).isdecimal() and not any(map(str.isdecimal, names)) else -1
    if not 0 <= number < count:
        known = f"{data.manifest.name} has the clients 0 to {count - 1}{', called ' if names else ''}"
        raise unknown_client(client, known, names)
    return number


def unknown_client(client: object, known: str, names: Sequence[str]) -> DatasetError:
    """Return the error for a client that is not among `names`, which it lists after `known`."""
    near = difflib.get_close_matches(str(client), names, 1)
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    hint = f"; did you mean {near[0]!r}?" if near else ""
    named = ", ".join(map(repr, names[:_MOST_NAMED]))
    return DatasetError(f"there is no client {client!r}: {known}{named}{more}{hint}", code="data.unknown-client")


def present_outputs(model: Model, outputs: Tensor, manifest: Manifest) -> list[Any]:
    """Return outputs (rows, \\*output shape) as classes by name, or as numbers in the target's unit."""
    classes = manifest.target.get("categories", [])
    several = outputs.shape[-1] > 1
    if several and (model.metric.name == "accuracy" or (outputs.ndim == 2 and outputs.shape[1] >= len(classes) > 1)):
        outputs = outputs.argmax(-1)
    elif outputs.shape[-1] == 1:
        outputs = outputs[:, 0]
    return present(outputs.numpy(), manifest)


def probability(model: Model, outputs: Tensor, manifest: Manifest) -> tuple[dict[str, NDArray[np.float64]], list[str]]:
    """Return the column of outputs' probabilities, and a note that says of which class they are, if the name does not.

    Of two classes it is the second, the last of scikit-learn's ``classes_``, and of several the predicted one. There is
    none if the loss knows no probabilities, or a row has several classes.
    """
    if model.loss.name not in PROBABLE or outputs.ndim != 2:
        return {}, []
    each = of_classes(outputs).double().softmax(1)
    if each.shape[1] > 2:
        return {"probability": each.max(1).values.numpy()}, ["The probability is that of the predicted class."]
    second = class_names(manifest.target.get("categories", []), 2)[1]
    return {f"probability of {second}": each[:, 1].numpy()}, []


def present(values: NDArray[Any], manifest: Manifest) -> list[Any]:
    """Return targets or predictions, (rows,) or (rows, outputs), in the target's unit, classes by name."""
    names = manifest.target.get("categories", [])
    # A class is its position; the sign tells a label of -1 or 1, or a score for it.
    whole = np.issubdtype(values.dtype, np.integer)
    if names and values.ndim == 1 and (whole or len(names) == 2):
        places = np.maximum(values if whole else np.sign(values), 0).astype(np.int64)
        return [*map(class_names(names, 1 + int(places.max(initial=0))).__getitem__, places)]
    if whole:
        return list(values.tolist())
    scaled = values * float(manifest.target.get("scale", 1.0))
    return list(scaled) if values.ndim > 1 else list(scaled.tolist())


def class_names(names: Sequence[str], count: int) -> list[str]:
    """Return at least so many classes' names; a class without one, as of a larger model, is its number."""
    return [*names, *map(str, range(len(names), count))]


def in_unit(value: float, model: Model, manifest: Manifest) -> str:
    """Return a value of the model's metric with its name, and in the target's unit if it has one."""
    scale, unit = (manifest.error_scale, manifest.target.get("unit", "")) if model.metric.name == "rmse" else (1.0, "")
    return f"{model.metric.name} {value * scale:.4g} {unit}".rstrip()
