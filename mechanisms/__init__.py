"""Mechanisms by name: built in, or your own as ``package.module:Class``."""

from __future__ import annotations

from mechanisms.base import Mechanism
from mechanisms.gaussian import Gaussian
from mechanisms.laplace import Laplace
from protocol.errors import ConfigError
from protocol.plugins import import_by_name

__all__ = ["MECHANISMS", "Gaussian", "Laplace", "Mechanism", "load"]

MECHANISMS: dict[str, type[Mechanism]] = {"laplace": Laplace, "gaussian": Gaussian}


def load(name: str) -> type[Mechanism]:
    """Return the mechanism class called `name`.

    Raises
    ------
    ConfigError
        When there is none, or it is no `Mechanism`; the text lists what there is.
    """
    if name in MECHANISMS:
        return MECHANISMS[name]
    if ":" not in name:
        raise ConfigError(
            f"unknown mechanism {name!r}; choose from {', '.join(MECHANISMS)} or give package.module:Class"
        )
    mechanism = import_by_name(name)
    if not (isinstance(mechanism, type) and issubclass(mechanism, Mechanism)):
        raise ConfigError(f"mechanism {name!r} is no class built on mechanisms.base.Mechanism")
    return mechanism
