"""What a run config says, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from protocol.errors import ConfigError


class Options:
    """Reads entries of a run config, with an error that names the key.

    Parameters
    ----------
    run_config : mapping
    """

    def __init__(self, run_config: Mapping[str, Any]) -> None:
        self._config = run_config

    def _get(self, key: str) -> Any:
        if key not in self._config:
            raise ConfigError(f"the run config lacks {key}; its default is in pyproject.toml, [tool.flwr.app.config]")
        return self._config[key]

    def text(self, key: str) -> str:
        """Return an entry that is text."""
        value = self._get(key)
        if not isinstance(value, str):
            raise ConfigError(f"{key} must be text, got {value!r}")
        return value

    def choice(self, key: str, options: tuple[str, ...]) -> str:
        """Return an entry that is one of `options`."""
        value = self.text(key)
        if value not in options:
            raise ConfigError(f"{key} must be one of {', '.join(options)}, got {value!r}")
        return value

    def flag(self, key: str) -> bool:
        """Return an entry that is true or false."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise ConfigError(f"{key} must be true or false, got {value!r}")
        return value

    def whole(self, key: str, least: int, most: int | None = None) -> int:
        """Return a whole number from `least` to `most`."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{key} must be a whole number of at least {least}, got {value!r}")
        if most is not None and value > most:
            raise ConfigError(f"{key} must be at most {most}, got {value}")
        return value

    def number(self, key: str, *, above: float | None = None, least: float | None = None) -> float:
        """Return a finite number above or of at least a bound."""
        value = self._get(key)
        bound = f"above {above:g}" if above is not None else f"of at least {least:g}"
        fits = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (above is None or value > above)
            and (least is None or value >= least)
        )
        if not fits:
            raise ConfigError(f"{key} must be a finite number {bound}, got {value!r}")
        return float(value)
