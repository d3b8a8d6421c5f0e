"""Where umbel's own files are: beside the package in a checkout or a bundle, inside it where a wheel is installed."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package itself."""

INSTALLED = PACKAGE / "_app"
"""Where a wheel has what lies at the root of a checkout; ``hatch_build.py`` puts it there."""

APP = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent
"""The folder of ``pyproject.toml``, ``LICENSE``, ``README.md`` and, but for a bundle, ``configs``."""

CONFIGS = APP / "configs"
"""The folder of the run configurations that go by name."""

OWN_PATH = "PYTHONPATH_UMBEL"
"""Variable with the folders of a user's own modules: the processes of a run work elsewhere than the user does.

A name that begins with ``UMBEL_`` would be an entry of a site's policy.
"""


def source(name: str) -> Path:
    """Return where a file or folder is that lies at ``name`` in a checkout; patterns stay patterns."""
    return (PACKAGE.parent if name.startswith(f"{PACKAGE.name}/") else APP) / name
