"""Hypotheses as files for other programs."""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from umbel.client.personal import Predictors
from umbel.client.personal.predictors import mixed
from umbel.client.prediction import class_names
from umbel.data import Column, Dataset, Manifest, Schema
from umbel.data.table import Reading, encode, seen
from umbel.models.fit import Traits, one_line, traits_of
from umbel.models.model import Model
from umbel.protocol.errors import ConfigError, DatasetError, DiskError, ModelError
from umbel.protocol.home import write_atomically
from umbel.protocol.project import to_install

_ROWS = 3  # rows on which the file is compared after it is read back
_TOLERANCE = 1e-4  # ONNX's operators round differently
_INSIDE = "umbel/"  # prefix of all internal names, so that a column can have any name


LACKING, STRANGE = -2, -1
"""Internal places of a category: for a missing text, and for one that the schema does not accept."""


@dataclass(frozen=True)
class Input:
    """A feature of a schema as an input."""

    column: Column

    def __post_init__(self) -> None:
        if self.column.type == "date":
            text = f"column {self.name!r} holds dates, which no ONNX file takes; import it as numbers, such as its year"
            raise DatasetError(text, code="data.date-in-onnx")

    @property
    def name(self) -> str:
        return self.column.name

    @property
    def text(self) -> bool:
        """Whether it takes text, which the graph knows as positions in the list of categories."""
        return self.column.type == "category"

    @property
    def takes(self) -> str:
        """The accepted values, for the file's metadata."""
        return "text, empty if missing" if self.text else "float64, NaN if missing"

    @property
    def inside(self) -> torch.dtype:
        """The type of its numbers in the graph."""
        return torch.int64 if self.text else torch.float64

    @cached_property
    def instead(self) -> NDArray[np.float64] | None:
        """A model's view of a missing value (numbers,); None if the row gets no prediction."""
        if self.column.fill == "" and self.column.missing != "indicate":
            return None
        frame = pd.DataFrame({self.name: pd.Series([None], dtype=object)})
        return np.asarray(seen(frame, self.column, Reading("a missing value"))[0], np.float64)

    def encoded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a model's view (rows, numbers), as in `umbel.data.table.seen`, and which rows get a prediction."""
        if self.column.outside == "clip":
            values = torch.where(values.isfinite(), values.clamp(*self._limits), values)
        column, numbers = self.column, values[:, None]
        lacks, sound = (values == LACKING, values >= 0) if self.text else (values.isnan(), self._sound(values))
        if self.text and column.encode == "one-hot":
            numbers = numbers == torch.arange(len(column.classes))
        stored = column.stored[:-1] if column.missing == "indicate" else column.stored
        offsets, scales = (
            torch.tensor([one[key] for one in stored], dtype=torch.float64) for key in ("offset", "scale")
        )
        numbers = (numbers.double() - offsets) / scales
        if column.missing == "indicate":
            numbers = torch.cat([numbers, torch.zeros_like(numbers[:, :1])], 1)
        if self.instead is None:
            return numbers, sound & ~lacks
        return torch.where(lacks[:, None], torch.from_numpy(self.instead), numbers), sound | lacks

    def example(self, rows: int) -> pd.Series:
        """Return values as in a table, (rows,); the third is missing, if that is allowed."""
        column, places, (low, high) = self.column, range(rows), self._limits
        values: Any = [i % 2 == 0 for i in places]
        if self.text:
            values = [column.categories[i % len(column.categories)] for i in places]
        elif column.type != "boolean":
            values = np.clip(column.offset + column.scale * np.linspace(-1, 1, rows + 1)[1:], low, high)
            if column.type == "integer":
                values = np.clip(np.ceil(values), np.ceil(low), np.floor(high))
        found = pd.Series(values, dtype=object)
        return found.where(found.index != 2, None) if self.instead is not None else found

    def given(self, values: pd.Series) -> NDArray[Any]:
        """Return the values of `example` as the file takes them."""
        return values.fillna("").to_numpy(object) if self.text else values.to_numpy(np.float64, na_value=np.nan)

    @property
    def _limits(self) -> tuple[float, float]:
        low, high = self.column.minimum, self.column.maximum
        return -np.inf if low is None else low, np.inf if high is None else high

    def _sound(self, values: Tensor) -> Tensor:
        """Return which numbers the schema accepts."""
        if self.column.type == "boolean":
            return (values == 0) | (values == 1)
        low, high = self._limits
        sound = (values >= low) & (values <= high) & (values.abs() < torch.inf)
        return sound & (values == values.round()) if self.column.type == "integer" else sound


def to_onnx(network: nn.Module, model: Model, dataset: Dataset | None, said: Mapping[str, str]) -> bytes:
    """Return a network of rows, as the model sees them, as an ONNX file with `said` as metadata.

    The file is run on a few rows, and must give the same result as umbel.
    """
    try:
        import onnx  # noqa: F401  what torch.onnx writes with
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        text = f"{error.name} is not installed: pip install {to_install('onnx', 'onnxruntime', 'onnxscript')}"
        raise ConfigError(text, code="config.not-installed") from None
    if dataset is None:
        text = "ONNX needs the run's dataset, which describes a row; the dataset is not on this machine"
        raise ConfigError(text, code="config.no-dataset")
    if dataset.manifest.layout is None:
        text = f"dataset {dataset.manifest.name} has no schema, whose columns an ONNX file takes; export safetensors"
        raise DatasetError(f"{text}, and write the network by torch.onnx", code="data.no-schema")
    graph = _Graph(network, traits_of(model, dataset.features.shape[1:]), dataset.manifest.layout)
    try:
        content = graph.written({**_said(dataset.manifest, graph.schema), **said})
        session, differs = onnxruntime.InferenceSession(content), False
        for rows in (_ROWS, 1):
            given, outputs = graph.example(rows)
            differs = differs or not _alike(session.run(None, given)[-1], outputs)
    except Exception as error:  # the exporter may raise anything over a user's network
        text = f"model {model.name!r} cannot be written as ONNX: {one_line(error)}"
        raise ModelError(text, code="model.onnx") from error
    if differs:
        text = f"model {model.name!r} gives different {graph.results[-1]} in ONNX and in PyTorch; nothing is written"
        raise ModelError(text, code="model.reads-otherwise")
    return content


class _Graph(nn.Module):
    """The module to export, from the columns of a schema to its target: ``column_0, column_1, ...`` in, results out."""

    def __init__(self, network: nn.Module, seen: Traits, schema: Schema) -> None:
        super().__init__()
        self.network = network
        self.schema, self.columns = schema, [Input(one) for one in schema.features]
        self.names, self._tokens = [one.name for one in self.columns], seen.tokens
        classes, count = schema.target.classes, seen.outputs[-1]
        # A single output is the score of the second of two classes, and names none of several.
        self.classes = class_names(classes, count) if classes and (count > 1 or len(classes) == 2) else []
        self.scale = 1.0 if classes else schema.target.scale
        outputs = ("prediction", "scores") if self.classes else ("prediction",)
        self.results = [_free(name, self.names) for name in outputs]

    def written(self, said: Mapping[str, str]) -> bytes:
        """Return the file."""
        import onnx

        count = len(self.names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about names that PyTorch's own exporter does not use
            program = torch.onnx.export(
                self,
                tuple(torch.zeros(2, dtype=one.inside) for one in self.columns),
                input_names=[f"column_{i}" for i in range(count)],
                output_names=[f"result_{i}" for i in range(len(self.results))],
                dynamic_shapes=(({0: "rows"},) * count,),
                dynamo=True,
                verbose=False,
            )
        assert program is not None, "without a file it returns the program"
        found = onnx.compose.add_prefix(program.model_proto, _INSIDE)
        graph = found.graph
        first = [self._enter(i, name) for i, name in enumerate(self.names)]
        last = [self._leave(i, name) for i, name in enumerate(self.results)]
        nodes = [*first, *graph.node, *last]
        for node in nodes:
            del node.metadata_props[:]  # file names and lines of this machine
        del graph.node[:]
        graph.node.extend(nodes)
        for known, ends, made in ((graph.input, self.names, first), (graph.output, self.results, last)):
            for value, name, node in zip(known, ends, made, strict=True):
                value.name = name
                if node.op_type == "LabelEncoder":
                    value.type.tensor_type.elem_type = onnx.TensorProto.STRING
        if not any(one.domain == "ai.onnx.ml" for one in found.opset_import):
            found.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 2))
        onnx.helper.set_model_props(found, dict(said))
        onnx.checker.check_model(found)
        content: bytes = found.SerializeToString()
        return content

    def forward(self, *columns: Tensor) -> tuple[Tensor, ...]:
        each = [one.encoded(values) for one, values in zip(self.columns, columns, strict=True)]
        numbers, sound = zip(*each, strict=True)
        taken = torch.stack(list(sound)).all(0)
        rows = torch.where(taken[:, None], torch.cat(list(numbers), 1).float(), 0.0)
        outputs = torch.where(taken[:, None], self._outputs(rows), torch.nan)
        if not self.classes:
            return (outputs[:, 0] if outputs.shape[1] == 1 else outputs,)
        place = (outputs[:, 0] > 0).long() if outputs.shape[1] == 1 else outputs.argmax(1)
        return torch.where(taken, place, -1), outputs

    def example(self, rows: int) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        """Return made-up rows as the file takes them, and the network's outputs for them, as umbel encodes them."""
        frame = pd.DataFrame({one.name: one.example(rows) for one in self.columns})
        # They are numbers already, however a site's table writes them.
        plain = [one.model_copy(update={"decimal": ""}) for one in self.schema.features]
        alone = self.schema.model_copy(update={"client": None, "features": plain})
        seen = torch.from_numpy(encode(frame, alone, "made-up rows", to_predict=True).features)
        with torch.inference_mode():
            outputs: NDArray[Any] = self._outputs(seen).numpy()
        return {one.name: one.given(frame[one.name]) for one in self.columns}, outputs

    def _outputs(self, rows: Tensor) -> Tensor:
        """Return the outputs for rows as the model sees them, numbers in the target's unit."""
        outputs: Tensor = self.network(rows.long() if self._tokens else rows)
        return outputs if self.classes else outputs * self.scale

    def _enter(self, i: int, name: str) -> Any:
        column, inside = self.schema.features[i], f"{_INSIDE}column_{i}"
        if column.type != "category":
            return _node("Identity", name, inside)
        places = {"": LACKING} | {text: place for place, text in enumerate(column.categories)}
        return _node(
            "LabelEncoder",
            name,
            inside,
            keys_strings=list(places),
            values_int64s=list(places.values()),
            default_int64=len(column.categories) if column.other == "category" else STRANGE,
        )

    def _leave(self, i: int, name: str) -> Any:
        inside = f"{_INSIDE}result_{i}"
        if i or not self.classes:
            return _node("Identity", inside, name)
        numbers = list(range(len(self.classes)))
        return _node("LabelEncoder", inside, name, keys_int64s=numbers, values_strings=self.classes, default_string="")


def _node(kind: str, takes: str, gives: str, **settings: Any) -> Any:
    import onnx

    domain = "ai.onnx.ml" if settings else None
    return onnx.helper.make_node(kind, [takes], [gives], domain=domain, **settings)


def _free(name: str, taken: Sequence[str]) -> str:
    """Return an output's name: an input may have it already, and then an underscore follows."""
    return _free(f"{name}_", taken) if name in taken else name


def _said(manifest: Manifest, schema: Schema) -> dict[str, str]:
    """Return a dataset's description of its columns, for the metadata; entries of several parts are JSON."""
    inputs = [one.model_dump(exclude_defaults=True) | {"takes": Input(one).takes} for one in schema.features]
    told = {"inputs": inputs, "target": schema.target.model_dump(exclude_defaults=True)}
    texts = {"dataset": manifest.name, "provenance": manifest.provenance, "licence": manifest.licence}
    return texts | {key: json.dumps(value, ensure_ascii=False) for key, value in told.items()}


def _alike(outputs: NDArray[Any], expected: NDArray[Any]) -> bool:
    most = float(np.abs(expected).max(initial=0.0))
    return bool(
        np.allclose(outputs, expected.reshape(outputs.shape), rtol=_TOLERANCE, atol=_TOLERANCE * max(1.0, most))
    )


_FORMS = ("safetensors", "onnx")


def write_networks(
    networks: Mapping[str, nn.Module],
    folder: Path,
    form: str,
    model: Model,
    dataset: Dataset | None,
    said: Mapping[str, str],
    private: bool = False,
) -> list[Path]:
    """Write networks of a model under names, and return the files. See `umbel.export`.

    ONNX needs a dataset, and keeps `said` as metadata. Only the owner may read `private` files. If anything fails, the
    folder is as it was, and absent if it was absent.
    """
    if form not in _FORMS:
        text = f"there is no file format {form!r}; choose from {', '.join(_FORMS)}"
        raise ConfigError(text, code="config.unknown-format")
    files = [folder / f"{name}.{form}" for name in networks]
    if not private and (more := {*folder.glob(f"hypothesis-*.{form}")} - {*files}):
        text = f"{min(more)} belongs to a run with more hypotheses, and would look like a file of this one"
        raise ConfigError(f"{text}; remove it, or name another folder", code="config.other-files")
    contents = []
    for name, network in networks.items():
        if form == "onnx":
            contents.append(to_onnx(network, model, dataset, {"name": name, "model": model.name, **said}))
        else:
            # Cloned, since tied parameters share their memory.
            state = {key: value.detach().clone().contiguous() for key, value in network.state_dict().items()}
            contents.append(safetensors.torch.save(state))
    try:
        there = next(one for one in (folder, *folder.parents) if one.exists())
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=there) as scratch:
            for file, content in zip(files, contents, strict=True):
                write_atomically(Path(scratch, file.name), content, private)
            _move(Path(scratch), files)
    except DiskError:
        raise
    except OSError as error:
        text = f"{folder} cannot take the files: {error.strerror}; name another folder"
        raise ConfigError(text, code="config.no-folder") from None
    return files


def _move(scratch: Path, files: Sequence[Path]) -> None:
    """Move files from another folder on the same disk to their places, all of them or, if anything fails, none."""
    folder, kept = files[0].parent, scratch / "kept"
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    kept.mkdir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if file.is_file():
                file.replace(kept / file.name)
            (scratch / file.name).replace(file)
    except BaseException:  # such as Ctrl-C
        for file in files:
            if (kept / file.name).exists():
                (kept / file.name).replace(file)
            elif not (scratch / file.name).exists():
                file.unlink()
        for one in new:
            with suppress(OSError):
                one.rmdir()
        raise


class OwnNetwork(nn.Module):
    """The predictor of one client as a network, without networks of weight 0.

    For classes, all outputs of a row may differ from those of `Predictors.outputs` by a constant, which changes no
    probability.

    Parameters
    ----------
    model : Model
        Without local parameters.
    own : Predictors
        The predictor of one client.

    Raises
    ------
    ConfigError
        If the predictor is of another kind, which a network may not be, and which may hold the client's rows.
    """

    def __init__(self, model: Model, own: Predictors) -> None:
        super().__init__()
        if type(own) is not Predictors:
            text = f"a predictor of {type(own).__name__} may hold the client's rows, which a file for others must not"
            raise ConfigError(f"{text}; choose another method of personalise", code="config.rows-in-file")
        self._loss = model.loss
        weights, networks = own.weights[0], []
        for j in np.flatnonzero(weights):
            network = copy.deepcopy(model.module)
            state = {name: torch.from_numpy(np.array(value[0, j])) for name, value in own.parameters.items()}
            network.load_state_dict(state, strict=False)
            networks.append(network)
        self.networks = nn.ModuleList(networks)
        self._weights = torch.from_numpy(weights[weights != 0])
        self._factor, self._offset = torch.from_numpy(own.factor[0]), torch.from_numpy(own.offset[0])
        self.eval()

    def forward(self, rows: Tensor) -> Tensor:
        """Return outputs (rows, \\*output shape), as of `Predictors.outputs`."""
        each = [network(rows) for network in self.networks]
        outputs = torch.stack([getattr(one, "logits", one) for one in each]).double()
        result = outputs[0]
        if len(each) > 1:
            result = mixed(self._loss, outputs, self._weights[:, None].expand(-1, outputs.shape[1]))
        found: Tensor = (self._factor * result + self._offset).float()
        return found
