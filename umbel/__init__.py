"""umbel: what people type and import. Personalised and private federated learning, as a Flower App."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from federation import Manifest as Manifest
    from federation import Schema as Schema
    from federation import write_federation as write_federation
    from privacy.mod import Gate as Gate
    from umbel.data import Dirichlet as Dirichlet
    from umbel.data import Quantity as Quantity
    from umbel.data import Uniform as Uniform
    from umbel.data import from_arrays as from_arrays
    from umbel.data import from_dataframe as from_dataframe
    from umbel.data import from_datasets as from_datasets
    from umbel.data import from_image_folder as from_image_folder
    from umbel.exports import export as export
    from umbel.plans import plan as plan
    from umbel.runs import Run as Run
    from umbel.runs import load as load
    from umbel.runs import run as run
    from umbel.sweeps import sweep as sweep

_HOMES = {
    "Dirichlet": "umbel.data",
    "Gate": "privacy.mod",
    "Manifest": "federation",
    "Quantity": "umbel.data",
    "Run": "umbel.runs",
    "Schema": "federation",
    "Uniform": "umbel.data",
    "export": "umbel.exports",
    "from_arrays": "umbel.data",
    "from_dataframe": "umbel.data",
    "from_datasets": "umbel.data",
    "from_image_folder": "umbel.data",
    "load": "umbel.runs",
    "plan": "umbel.plans",
    "run": "umbel.runs",
    "sweep": "umbel.sweeps",
    "write_federation": "federation",
}
"""Where each public name is: it is imported when it is asked for, since PyTorch takes a second."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'umbel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
