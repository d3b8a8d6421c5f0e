"""What a wheel holds besides the package, so that an installed umbel can make its bundle and finds ``configs``.

An editable install finds these in the checkout. It holds a line for Python's start instead: a folder ``umbel`` beside a
script, such as the one for data in the home, would otherwise hide the package.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts what lies at the root into ``umbel/_app`` (see `umbel.protocol.project`)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files; `version` is "editable" or "standard"."""
        if version == "standard":
            names = ("LICENSE", "README.md", "configs", "pyproject.toml")
            build_data["force_include"] |= {name: f"umbel/_app/{name}" for name in names}
        else:
            # Python reads these files in the order of their names: this one after that which adds the finder.
            build_data["force_include_editable"] |= {"tools/first.pth": "umbel_first.pth"}
