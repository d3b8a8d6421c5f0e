"""umbel: what people type and import. Personalised and private federated learning, as a Flower App."""

from __future__ import annotations

from importlib import import_module
from typing import Any

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

_OLD = {"write_federation": "write_dataset"}
"""Names of umbel 0.1, understood until 2.0."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _OLD:
        import_module("umbel.protocol.old_names").hint(f"umbel.{name}", f"umbel.{_OLD[name]}")
        name = _OLD[name]
    if name not in _HOMES:
        raise AttributeError(f"module 'umbel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
