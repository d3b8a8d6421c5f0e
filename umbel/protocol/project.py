"""Locations of umbel's own files: beside the package in a checkout or bundle, inside it in an installed wheel."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package."""

INSTALLED = PACKAGE / "_app"
"""The folder, in a wheel, of files from the root of a checkout; ``hatch_build.py`` puts them there."""

APP = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent
"""The folder of ``pyproject.toml``, ``LICENSE``, ``README.md`` and, except in a bundle, ``configs``."""

CONFIGS = APP / "configs"
"""The folder of the run configurations that have names."""

LAB_PACKAGE = "umbel-lab (in a checkout: pip install -e lab)"
"""What hints install for umbel's lab."""

OWN_PATH = "PYTHONPATH_UMBEL"
"""Environment variable with the folders of the user's modules, for a run's processes in other working directories.

They come before installed modules of the same name, or, if the first entry is empty, after them.

Its name does not begin with ``UMBEL_``, since such a name would be an entry of a site's policy.
"""

_MODULES = {"mlflow-skinny": "mlflow", "umbel-lab": "umbel_lab"}
"""Packages whose module has another name."""

ENGINE = "UMBEL_ENGINE"
"""Environment variable with the engine that computes simulated clients (`umbel.client.learner.engine_asked`)."""


@cache
def described() -> Mapping[str, Any]:
    """Return the table ``project`` of umbel's own ``pyproject.toml``. An image has no package metadata."""
    found: Mapping[str, Any] = tomllib.loads((APP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def to_install(*modules: str) -> str:
    """Return the packages of modules as words for pip, with the versions that umbel needs; empty for unknown modules.

    A hint names these, and not an extra of umbel, because the reader's package index may not have umbel itself.
    """
    project = described()
    texts = [*chain(*project["optional-dependencies"].values()), *project["dependencies"], "umbel-lab"]
    packages = {re.split(r"[^\w-]", text, maxsplit=1)[0]: text for text in texts}
    del packages["umbel"]  # in an extra that gathers others
    known = {_MODULES.get(package, package): text for package, text in packages.items()}
    return " ".join(shlex.quote(known[one]) for one in modules if one in known)


def source(name: str) -> Path:
    """Return the location of the file or folder ``name`` of a checkout; patterns stay patterns."""
    return (PACKAGE.parent if name.startswith(f"{PACKAGE.name}/") else APP) / name
