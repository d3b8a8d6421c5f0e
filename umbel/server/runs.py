"""Runs by name, from their folders under ``$UMBEL_HOME/runs``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors

from umbel.protocol.errors import ConfigError, ProtocolError
from umbel.protocol.home import special_file, umbel_home

DAMAGE = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError,
    safetensors.SafetensorError,
)  # fmt: skip
"""The errors that Python raises if a run's file has been changed."""

_LONGEST = 200

LAST = "last"
"""Stands for the newest run."""


def home_of_runs() -> Path:
    """Return the folder of all runs."""
    return umbel_home() / "runs"


def all_runs() -> list[Path]:
    """Return the folders of all runs, the oldest first."""
    # Their names begin with their start times.
    return sorted(path.parent for path in home_of_runs().glob("*/config.toml"))


def find_run(name: str) -> Path:
    """Return the folder of a run: by its path, its name, the beginning of its name, or as "last".

    Raises
    ------
    ConfigError
        If there is none, or several; the text names similar ones.
    """
    path = _find(name)
    if strange := special_file(path):
        raise ConfigError(f"{path} holds {strange.name!r}, which is not a file; delete it", code="config.special-file")
    return path


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    # Not `Path.is_file`, which raises in a folder that this user cannot read.
    if os.path.isfile(path / "config.toml"):
        return path.absolute()
    runs = {run.name: run for run in all_runs()}
    if name in runs:
        return runs[name]
    if name == LAST and runs:
        return list(runs.values())[-1]
    begin = [run for run in runs if name and run.startswith(name)]
    if len(begin) == 1:
        return runs[begin[0]]
    if os.path.isdir(path):
        raise ConfigError(
            f"{path} holds no run: config.toml is missing; give the folder of one run", code="config.no-run"
        )
    if begin:
        raise ConfigError(
            f"{len(begin)} runs begin with {name!r}: {', '.join(begin[:3])}, ...; give more of the name",
            code="config.ambiguous-run",
        )
    near = difflib.get_close_matches(name, runs, 1, 0.8)
    hint = f"did you mean {near[0]}?" if near else "list them with: umbel runs list"
    raise ConfigError(f"there is no run {name!r} in {home_of_runs()}; {hint}", code="config.no-run")


def run_named(key: str, name: str) -> Path:
    """Return the result of `find_run` for a run in an entry of the run config; errors name the entry."""
    try:
        return find_run(name)
    except ConfigError as error:
        raise ConfigError.of(error, f"{key}: ") from None


@contextmanager
def reading(run: Path | str, key: str = "") -> Iterator[None]:
    """Report in one line that a run's files have been changed: the folder may have been sent.

    `key` is the entry of the run config that names the run.
    """
    try:
        yield
    except (ProtocolError, *DAMAGE) as error:
        text = error.text if isinstance(error, ProtocolError) else str(error)
        what = f"{type(error).__name__}: {' '.join(text.split())}"[:_LONGEST]
        where = f"{key}: {run}" if key else str(run)
        raise ConfigError(f"{where} is damaged: {what}; restore an intact copy", code="config.run-damaged") from error


@contextmanager
def opening(run: Path, key: str = "") -> Iterator[None]:
    """Report in one line that a folder holds no run with a finished round, or a damaged one; see `reading`."""
    with reading(run, key):
        try:
            yield
        except OSError as error:
            where = f"{key}: {run}" if key else str(run)
            raise ConfigError(f"{where} holds no run that finished a round: {error}", code="config.no-run") from error
