"""Code of one's own, by import path."""

from __future__ import annotations

import importlib
from typing import Any

from protocol.errors import ConfigError


def import_by_name(name: str) -> Any:
    """Return the object called ``package.module:attribute``.

    Raises
    ------
    ConfigError
        When there is none; the text says which half is missing.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or module_name.startswith("."):
        raise ConfigError(f"cannot import {module_name!r} of {name!r}: give the module's full name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"cannot import {module_name!r} of {name!r}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{module_name!r} has no {attribute!r} (asked for {name!r})") from None
