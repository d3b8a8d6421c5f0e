"""The command `umbel` in this process, as a person types it."""

from __future__ import annotations

from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from tests.helpers.errors import ended
from umbel.cli.main import app


def done(*words: object) -> Result:
    """Return all that a command left."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, words)], prog_name="umbel")


def umbel(*words: object) -> tuple[int, str]:
    """Return a command's exit code, and what it printed."""
    told = done(*words)
    return told.exit_code, told.output


def said(*words: object) -> str:
    """Return what a command that succeeds prints."""
    code, output = umbel(*words)
    assert code == 0, output
    return output


def refused(code: str, *words: object, parts: tuple[object, ...] = ()) -> str:
    """Return the one line in which a command ends, with an error of this code or kind that has each part."""
    told = done(*words)
    ended(told.exit_code, told.stderr, code, *parts)
    return str(told.stderr)


def schema_of(dataset: str, file: Path, old: str = "", new: str = "") -> Path:
    """Write the schema of a dataset, with a text in place of another, and return the file."""
    text = said("data", "show", dataset, "--schema")
    assert old in text
    file.write_text(text.replace(old, new) if old else text)
    return file
