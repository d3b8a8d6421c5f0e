"""What a wheel holds besides the package, so that an installed umbel can make its bundle and finds ``configs``.

An editable install has none of it: it finds them in the checkout.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts what lies at the root into ``umbel/_app`` (see `umbel.protocol.project`)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files; `version` is "editable" or "standard"."""
        if version == "standard":
            names = ("LICENSE", "README.md", "configs", "examples/flower_app", "pyproject.toml")
            build_data["force_include"] |= {name: f"umbel/_app/{name}" for name in names}
