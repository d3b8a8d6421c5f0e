"""Hypotheses as files that other programs read; each is read again and compared before any is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from umbel.client.cohort import Cohort
from umbel.data import Dataset
from umbel.models.fit import look, one_line
from umbel.models.model import Model
from umbel.protocol.errors import ConfigError, ModelError
from umbel.protocol.home import write_atomically

_ROWS = 3  # on which a network that was read again is compared
_TOLERANCE = 1e-4  # ONNX's operators round another way


def write_networks(
    networks: Sequence[nn.Module], folder: Path, form: str, model: Model, dataset: Dataset | None
) -> list[Path]:
    """Write networks of a model, and return the files; ONNX takes a dataset. See `umbel.export`."""
    if form not in _FORMS:
        raise ConfigError(f"there is no form {form!r}; choose from {', '.join(_FORMS)}", code="config.unknown-format")
    write, suffix = _FORMS[form]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{folder} cannot be made a folder: {error.strerror}; name another"
        raise ConfigError(text, code="config.no-folder") from None
    made = {folder / f"hypothesis-{j}.{suffix}": write(one, model, dataset) for j, one in enumerate(networks)}
    for path, content in made.items():
        write_atomically(path, content)
    return list(made)


def _state_dict(network: nn.Module, *_: object) -> bytes:
    buffer = BytesIO()
    torch.save(network.state_dict(), buffer)
    _compare(network, torch.load(BytesIO(buffer.getvalue()), weights_only=True))
    return buffer.getvalue()


def _safetensors(network: nn.Module, *_: object) -> bytes:
    state = {name: value.detach().clone().contiguous() for name, value in network.state_dict().items()}
    content = safetensors.torch.save(state)
    _compare(network, safetensors.torch.load(content))
    return content


def _compare(network: nn.Module, read: dict[str, Tensor]) -> None:
    """Raise unless a network that loads what was read has the same parameters, to the bit."""
    fresh = copy.deepcopy(network)
    fresh.load_state_dict(read, strict=True)
    loaded = fresh.state_dict()
    if wrong := [name for name, value in network.state_dict().items() if not torch.equal(loaded[name], value)]:
        raise ModelError(f"{wrong} would not be read as they were; nothing is written", code="model.reads-otherwise")


def _onnx(network: nn.Module, model: Model, dataset: Dataset | None) -> bytes:
    try:
        import onnx  # noqa: F401  what torch.onnx writes with
        import onnxruntime
    except ImportError as error:
        text = f"{error.name} is not installed: pip install umbel[onnx]"
        raise ConfigError(text, code="config.not-installed") from None
    if dataset is None:
        text = "ONNX takes a row to follow through the network: the run's dataset is not there"
        raise ConfigError(text, code="config.no-dataset")
    rows = _some_rows(model, dataset)
    named: dict[str, Any] = {"input_names": ["rows"], "output_names": ["outputs"], "dynamic_shapes": ({0: "rows"},)}
    try:
        program = torch.onnx.export(network, (rows,), **named, dynamo=True, verbose=False)
        assert program is not None, "without a file it returns the program"
        content: bytes = program.model_proto.SerializeToString()
    except Exception as error:  # the exporter may raise anything over a user's network
        text = f"model {model.name!r} cannot be written as ONNX: {one_line(error)}"
        raise ModelError(text, code="model.onnx") from error
    session = onnxruntime.InferenceSession(content)
    for part in (rows, rows[:1]):
        (found,) = session.run(None, {"rows": part.numpy()})
        with torch.inference_mode():
            wanted = network(part).numpy()
        if not np.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
            text = f"model {model.name!r} gives other outputs as ONNX than in PyTorch; nothing is written"
            raise ModelError(text, code="model.reads-otherwise")
    return content


def _some_rows(model: Model, dataset: Dataset) -> Tensor:
    """Return a few rows as the model sees them: bytes scaled, tokens as whole numbers."""
    clients = range(min(_ROWS, dataset.manifest.clients))  # each has a row at least
    rows = Cohort.gather(dataset, clients, torch.device("cpu")).features[:_ROWS]
    return rows.long() if look(model, tuple(rows.shape[1:])).tokens else rows


_FORMS: dict[str, tuple[Callable[[nn.Module, Model, Dataset | None], bytes], str]] = {
    "state-dict": (_state_dict, "pt"),
    "safetensors": (_safetensors, "safetensors"),
    "onnx": (_onnx, "onnx"),
}
