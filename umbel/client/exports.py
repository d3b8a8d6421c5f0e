"""Hypotheses as files for other programs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from umbel.client.onnx_files import to_onnx
from umbel.client.personal import Own
from umbel.client.personal.own import mixed
from umbel.data import Dataset
from umbel.models.model import Model
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import write_atomically

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

    ONNX needs a dataset, and keeps `said` as metadata. Only the owner may read `private` files.
    """
    if form not in _FORMS:
        text = f"there is no file format {form!r}; choose from {', '.join(_FORMS)}"
        raise ConfigError(text, code="config.unknown-format")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{folder} cannot become a folder: {error.strerror}; name another"
        raise ConfigError(text, code="config.no-folder") from None
    files = {name: folder / f"{name}.{form}" for name in networks}
    if not private and (more := {*folder.glob(f"hypothesis-*.{form}")} - {*files.values()}):
        text = f"{min(more)} belongs to a run with more hypotheses, and would look like a file of this one"
        raise ConfigError(f"{text}; remove it, or name another folder", code="config.other-files")
    made = {}
    for name, network in networks.items():
        if form == "onnx":
            content = to_onnx(network, model, dataset, {"name": name, "model": model.name, **said})
        else:
            # Cloned, since tied parameters share their memory.
            state = {name: value.detach().clone().contiguous() for name, value in network.state_dict().items()}
            content = safetensors.torch.save(state)
        made[files[name]] = content
    for path, content in made.items():
        write_atomically(path, content, private)
    return list(made)


class OwnNetwork(nn.Module):
    """The predictor of one client as a network, without networks of weight 0.

    For classes, all outputs of a row may differ from those of `Own.outputs` by a constant, which changes no
    probability.

    Parameters
    ----------
    model : Model
        Without local parameters.
    own : Own
        The predictor of one client.

    Raises
    ------
    ConfigError
        If the predictor is of another kind, which a network may not be, and which may hold the client's rows.
    """

    def __init__(self, model: Model, own: Own) -> None:
        super().__init__()
        if type(own) is not Own:
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
        """Return outputs (rows, \\*output shape), as of `Own.outputs`."""
        each = [network(rows) for network in self.networks]
        outputs = torch.stack([getattr(one, "logits", one) for one in each]).double()
        result = outputs[0]
        if len(each) > 1:
            result = mixed(self._loss, outputs, self._weights[:, None].expand(-1, outputs.shape[1]))
        found: Tensor = (self._factor * result + self._offset).float()
        return found
