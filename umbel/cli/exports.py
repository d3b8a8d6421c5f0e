"""A run's hypotheses as files that other programs read, each read again and compared before it is called done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from umbel.cli.runs import Run
from umbel.client.cohort import Cohort
from umbel.data import Dataset
from umbel.models.fit import look, one_line
from umbel.models.model import Model
from umbel.protocol.errors import ConfigError, ModelError
from umbel.protocol.home import write_atomically

_ROWS = 3  # on which a network that was read again is compared
_TOLERANCE = 1e-4  # ONNX's operators round another way


def export(run: Run, folder: Path, form: str = "safetensors") -> list[Path]:
    """Write the best hypotheses of a run, and return the files.

    Parameters
    ----------
    run : Run
    folder : Path
        Made where there is none.
    form : str
        "state-dict" (.pt), "safetensors", or "onnx", which takes ``pip install umbel[onnx]`` and rows as the model
        sees them: bytes scaled.

    Raises
    ------
    ConfigError
        For another form, when ONNX is not installed, or when there can be no such folder.
    ModelError
        When the network cannot be written so, or what is read again is not the same.
    """
    write, suffix = _forms()[form] if form in _forms() else _unknown(form)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made a folder: {error.strerror}; name another", code="config.no-folder"
        ) from None
    # All are made before one is written.
    made = {folder / f"hypothesis-{j}.{suffix}": write(network, run) for j, network in enumerate(run.hypotheses)}
    for path, content in made.items():
        write_atomically(path, content)
    return list(made)


def _forms() -> dict[str, tuple[Callable[[nn.Module, Run], bytes], str]]:
    return {"state-dict": (_state_dict, "pt"), "safetensors": (_safetensors, "safetensors"), "onnx": (_onnx, "onnx")}


def _unknown(form: str) -> tuple[Callable[[nn.Module, Run], bytes], str]:
    raise ConfigError(f"there is no form {form!r}; choose from {', '.join(_forms())}", code="config.unknown-format")


def _state_dict(network: nn.Module, run: Run) -> bytes:
    buffer = BytesIO()
    torch.save(network.state_dict(), buffer)
    read = torch.load(BytesIO(buffer.getvalue()), weights_only=True)
    _same(network, read)
    return buffer.getvalue()


def _safetensors(network: nn.Module, run: Run) -> bytes:
    state = {name: value.detach().clone().contiguous() for name, value in network.state_dict().items()}
    content = safetensors.torch.save(state)
    _same(network, safetensors.torch.load(content))
    return content


def _same(network: nn.Module, read: dict[str, Tensor]) -> None:
    """Raise unless a network that loads what was read has the same parameters, to the bit."""
    fresh = copy.deepcopy(network)
    fresh.load_state_dict(read, strict=True)
    wrong = [name for name, value in network.state_dict().items() if not torch.equal(fresh.state_dict()[name], value)]
    if wrong:
        raise ModelError(
            f"what was written of {wrong} is not what is read again; nothing was written", code="model.reads-otherwise"
        )


def _onnx(network: nn.Module, run: Run) -> bytes:
    try:
        import onnx  # noqa: F401  what torch.onnx writes with
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed: pip install umbel[onnx]", code="config.not-installed"
        ) from None
    dataset = run.dataset
    if dataset is None:
        raise ConfigError(
            "ONNX takes a row to follow through the network: the run's dataset is not there", code="config.no-dataset"
        )
    rows = _some(run.model, dataset)
    try:
        program = torch.onnx.export(
            network,
            (rows,),
            input_names=["rows"],
            output_names=["outputs"],
            dynamic_shapes=({0: "rows"},),
            dynamo=True,
            verbose=False,
        )
        assert program is not None, "without a file it returns the program"
        content: bytes = program.model_proto.SerializeToString()
    except Exception as error:  # whatever the exporter finds in a user's network
        raise ModelError(
            f"model {run.model.name!r} cannot be written as ONNX: {one_line(error)}", code="model.onnx"
        ) from error
    session = onnxruntime.InferenceSession(content)
    for part in (rows, rows[:1]):
        (found,) = session.run(None, {"rows": part.numpy()})
        with torch.inference_mode():
            wanted = network(part).numpy()
        if not np.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise ModelError(
                f"model {run.model.name!r} gives other outputs as ONNX than in PyTorch; nothing was written",
                code="model.reads-otherwise",
            )
    return content


def _some(model: Model, dataset: Dataset) -> Tensor:
    """Return a few rows as the model sees them: bytes scaled, tokens as whole numbers."""
    clients = range(min(_ROWS, dataset.manifest.clients))  # each has a row at least
    rows = Cohort.gather(dataset, clients, torch.device("cpu")).features[:_ROWS]
    return rows.long() if look(model, tuple(rows.shape[1:])).tokens else rows
