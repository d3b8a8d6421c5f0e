"""Personalised and private federated learning, as a Flower App: the names for notebooks and scripts."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Each is imported when it is first named, since PyTorch takes a second.
_HOMES = {
    name: home
    for home, names in {
        "umbel.cli.plans": "plan price",
        "umbel.cli.runs": "Run export load run",
        "umbel.data": "Manifest Schema write_dataset",
        "umbel.models.model": "Model",
        "umbel.data.importers": "Dirichlet Uniform from_arrays from_dataframe from_datasets from_image_folder",
        "umbel.mods.choose": "ChooseHypothesis",
        "umbel.mods.laplace": "LaplaceMod",
        "umbel.mods.gate": "Gate",
        "umbel.privacy.mechanisms": "Mechanism",
        "umbel.simulation.sweeps": "sweep",
        "umbel.protocol.hypotheses": "hypotheses stack unstack",
        "umbel.strategies": "Callback FedAvg GroupPrivacy Stop",
    }.items()
    for name in names.split()
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'umbel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
