"""umbel: what people type and import. Personalised and private federated learning, as a Flower App."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbel.cli.exports import export as export
    from umbel.cli.plans import plan as plan
    from umbel.cli.runs import Run as Run
    from umbel.cli.runs import load as load
    from umbel.cli.runs import run as run
    from umbel.cli.sweeps import sweep as sweep
    from umbel.data import Manifest as Manifest
    from umbel.data import Schema as Schema
    from umbel.data import write_dataset as write_dataset
    from umbel.data.importers import Dirichlet as Dirichlet
    from umbel.data.importers import Quantity as Quantity
    from umbel.data.importers import Uniform as Uniform
    from umbel.data.importers import from_arrays as from_arrays
    from umbel.data.importers import from_dataframe as from_dataframe
    from umbel.data.importers import from_datasets as from_datasets
    from umbel.data.importers import from_image_folder as from_image_folder
    from umbel.privacy.gate.stock_app import Gate as Gate

_HOMES = {
    "Dirichlet": "umbel.data.importers",
    "Gate": "umbel.privacy.gate.stock_app",
    "Manifest": "umbel.data",
    "Quantity": "umbel.data.importers",
    "Run": "umbel.cli.runs",
    "Schema": "umbel.data",
    "Uniform": "umbel.data.importers",
    "export": "umbel.cli.exports",
    "from_arrays": "umbel.data.importers",
    "from_dataframe": "umbel.data.importers",
    "from_datasets": "umbel.data.importers",
    "from_image_folder": "umbel.data.importers",
    "load": "umbel.cli.runs",
    "plan": "umbel.cli.plans",
    "run": "umbel.cli.runs",
    "sweep": "umbel.cli.sweeps",
    "write_dataset": "umbel.data",
}
"""Where each public name is: it is imported when it is asked for, since PyTorch takes a second."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'umbel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
