"""Recipes, which make datasets of public raw data: scripts, loaded by their path.

The folder ``datasets`` is no package, so that it does not hide Hugging Face's library of that name.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from types import ModuleType

from umbel.data.find import BUNDLED


@cache
def recipes() -> Mapping[str, str]:
    """Return by each recipe's name what it makes, in a few words, without running it."""
    found = {}
    for file in sorted(BUNDLED.glob("*.py")):
        first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        if first.startswith("Recipe: "):
            found[file.stem] = first.removeprefix("Recipe: ")
    return found


@cache
def load_recipe(name: str) -> ModuleType:
    """Return the module that a recipe is; its ``app`` is its command."""
    spec = importlib.util.spec_from_file_location(f"umbel_recipe_{name}", BUNDLED / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
