"""Tables that ship with Python packages, imported as `umbel data import` itself advises.

plotly, which holds one of them, is not among umbel's dependencies.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from umbel.protocol.errors import ConfigError, SweepError

TABLES: Mapping[str, tuple[str, str, str]] = {
    "gapminder": ("plotly", "data.gapminder", "--client country --target lifeExp"),
    "breast-cancer": ("sklearn", "datasets.load_breast_cancer", "--clients 30 --alpha 0.5 --target target"),
}
"""By name: the package, its function, and the flags of the import."""

_ROWS_OF = {"load_breast_cancer": "frame"}
_SETTING = re.compile(r"--set ('[^']*'|\S+)")
_SCALES, _RANGES = "Models learn best", "A run with --epsilon"
"""The beginnings of an import's advice."""


def imported(name: str, seed: int, folder: Path) -> Path:
    """Write a table's dataset, unless it is there: imported twice, the second time with the first one's advice."""
    words = "-".join(re.findall(r"\w+", name))
    path = folder / f"{words}-{seed}"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{words}.csv"
    _write(name, file)
    command = ["data", "import", str(file), *shlex.split(TABLES[name][2]), "--set", f"seed={seed}"]
    status, told = _umbel([*command, "--replace", "--name", str(folder / "first" / path.name)])
    advice = [line for line in told.splitlines() if line.startswith((_SCALES, _RANGES))]
    added = [word.rstrip(".") for line in advice for flag in _SETTING.findall(line) for word in shlex.split(flag)]
    if not status:
        status, told = _umbel([*command, *(word for one in added for word in ("--set", one)), "--name", str(path)])
    if status:
        raise SweepError(f"{shlex.join(command)}: {told.splitlines()[-1]}", code="sweep.failed")
    return path


def _write(name: str, file: Path) -> None:
    """Write a table that ships with a package as a CSV file."""
    package, function, _ = TABLES[name]
    where, _, called = f"{package}.{function}".rpartition(".")
    try:
        found = getattr(import_module(where), called)(**{"as_frame": True} if package == "sklearn" else {})
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed: pip install plotly"
        raise ConfigError(text, code="config.not-installed") from None
    rows = getattr(found, _ROWS_OF[called]) if called in _ROWS_OF else found
    # Codes of the country tell a model nothing that its name does not.
    rows.drop(columns=["iso_alpha", "iso_num"], errors="ignore").to_csv(file, index=False)


def _umbel(words: Sequence[str]) -> tuple[int, str]:
    """Run a command of the shell; return its exit code, and what it printed."""
    environment = os.environ | {"COLUMNS": "200"}
    told = subprocess.run(
        [sys.executable, "-m", "umbel", *words], env=environment, check=False, capture_output=True, text=True
    )
    return told.returncode, told.stdout + told.stderr
