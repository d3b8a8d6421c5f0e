"""Weights from a file, from which a model starts in place of random ones."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from umbel.protocol.errors import ModelError
from umbel.protocol.home import umbel_home


def find_weights(name: str) -> Path:
    """Return the file of a name, an absolute path or one under ``$UMBEL_HOME/models``, or raise `ModelError`."""
    path = umbel_home() / "models" / Path(name).expanduser()
    if not path.is_file():
        raise ModelError(f"pretrained = {name!r}: there is no file {path}; put it there", code="model.pretrained")
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of a state dict that ``torch.save`` wrote; no code in it is run.

    Anything else is a `ModelError`.
    """
    try:
        if path.suffix == ".safetensors":
            found: Any = safetensors.torch.load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file may hold anything
        told = " ".join(str(error).split())[:200]
        raise ModelError(f"{path} cannot be read as weights: {told}", code="model.pretrained") from error
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ModelError(f"{path} holds no state dict; save model.state_dict()", code="model.pretrained")
    return dict(found)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
