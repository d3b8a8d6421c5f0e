"""What the app's source files import, read without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

APP = ("umbel",)
"""The packages of the app."""

LAB = "lab/umbel_lab"
"""The lab, a package of its own."""


def files(packages: Sequence[str] = APP, root: Path = ROOT) -> Iterator[Path]:
    """Yield the modules of packages; fail where a package has none."""
    for package in packages:
        found = sorted((root / package).rglob("*.py"))
        assert found, f"no modules in {package}"
        yield from found


def imported(file: Path) -> set[str]:
    """Return the full names of all modules that a file imports, wherever in it; those with a dot in front as they are.

    Of ``from a import b`` these are ``a`` and ``a.b``: which of the two is a module only an import would tell.
    """
    return _imported(file.read_text(encoding="utf-8"))


@cache
def _imported(text: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def packages_imported(file: Path) -> set[str]:
    """Return the top-level names of all modules that a file imports; a dot for one beside it."""
    return {name.partition(".")[0] or "." for name in imported(file)}
