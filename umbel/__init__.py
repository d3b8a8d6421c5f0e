"""umbel: what people type and import. Personalised and private federated learning, as a Flower App."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbel.exports import export as export
    from umbel.plans import plan as plan
    from umbel.runs import Run as Run
    from umbel.runs import load as load
    from umbel.runs import run as run
    from umbel.sweeps import sweep as sweep

_HOMES = {
    "Run": "umbel.runs",
    "export": "umbel.exports",
    "load": "umbel.runs",
    "plan": "umbel.plans",
    "run": "umbel.runs",
    "sweep": "umbel.sweeps",
}
"""Where each public name is: it is imported when it is asked for, since PyTorch takes a second."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'umbel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
