"""A user's own modules in a run's processes, which work elsewhere than where the user does."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from umbel.protocol.errors import ConfigError


@contextmanager
def own_code(folder: Path, values: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Let processes with the environment that is yielded import what lies in a folder.

    Only if the run config names some of it, as ``module:attribute``. Nothing of it stands before a module that is
    installed: in the folder of another Flower App there are names as ``client`` and ``server``, which umbel has too.

    Raises
    ------
    ConfigError
        When a module that the run config names has the name of one that is installed.
    """
    modules = own_modules(folder, values)
    if not modules:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="umbel-code-") as links:
        for path in modules:
            Path(links, path.name).symlink_to(path)
        yield {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), links]))}


def own_modules(folder: Path, values: Mapping[str, Any]) -> list[Path]:
    """Return the modules and packages in a folder if the run config names one; rules and errors as of `own_code`."""
    own = {name: path for path in folder.iterdir() if (name := _module(path))}
    named = {top for value in values.values() for top in _named(value)}
    hidden = sorted(name for name in named & own.keys() if _installed(name, own[name]))
    if hidden:
        raise ConfigError(
            f"{own[hidden[0]]} has the name of an installed module, which would be imported in its place; rename it"
        )
    if not named & own.keys():
        return []
    return [path for name, path in own.items() if not _installed(name, path)]


def _named(value: Any) -> set[str]:
    """Return the top-level modules that a value names, as ``module:attribute`` or several of these."""
    words = value.replace(";", " ").split() if isinstance(value, str) else []
    return {word.partition(":")[0].partition(".")[0] for word in words if ":" in word and "=" not in word}


def _module(path: Path) -> str:
    """Return what a file or folder is imported as; nothing for what is no module."""
    if path.suffix == ".py" and path.stem.isidentifier():
        return path.stem
    return path.name if path.is_dir() and path.name.isidentifier() and any(path.glob("*.py")) else ""


def _installed(name: str, path: Path) -> bool:
    """Return whether another module of that name is found than the one at `path`."""
    if name in sys.stdlib_module_names:
        return True
    before = sys.path
    # With ``python -m umbel`` the first is where the user is.
    sys.path = [one for place, one in enumerate(before) if place or Path(one or ".").absolute() != path.parent]
    try:
        found = PathFinder.find_spec(name)
    finally:
        sys.path = before
    places = [found.origin, *(found.submodule_search_locations or [])] if found else []
    return found is not None and not any(one and Path(one).is_relative_to(path) for one in places)
