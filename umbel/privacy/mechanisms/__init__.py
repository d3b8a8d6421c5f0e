"""Mechanisms by name: built in, or your own as ``package.module:Class``.

Each is imported when it is first named, so that noise alone needs neither SciPy nor the account.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbel.privacy.mechanisms.base import Mechanism
    from umbel.privacy.mechanisms.discrete_gaussian import DiscreteGaussian
    from umbel.privacy.mechanisms.gaussian import Gaussian
    from umbel.privacy.mechanisms.laplace import Laplace
    from umbel.privacy.mechanisms.named import MECHANISMS, load

__all__ = ["MECHANISMS", "DiscreteGaussian", "Gaussian", "Laplace", "Mechanism", "load"]

_HOMES = {
    "DiscreteGaussian": "discrete_gaussian",
    "Gaussian": "gaussian",
    "Laplace": "laplace",
    "MECHANISMS": "named",
    "Mechanism": "base",
    "load": "named",
}


@cache
def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
