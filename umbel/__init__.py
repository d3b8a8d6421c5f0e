"""umbel: what people type and import. Personalised and private federated learning, as a Flower App."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
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
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ImportError as error:
        if hidden := _hidden():
            raise ImportError(f"{hidden} stands before a package of umbel's that has its name; rename it") from error
        raise


def _hidden() -> str:
    """Return the file beside the user's script that is imported in place of a package of umbel's, if there is one."""
    root = Path(__file__).resolve().parent.parent
    for package in ("client", "federation", "mechanisms", "models", "privacy", "protocol", "server", "simulation"):
        found = find_spec(package)
        if found is not None and found.origin and not Path(found.origin).resolve().is_relative_to(root):
            return found.origin
    return ""


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
