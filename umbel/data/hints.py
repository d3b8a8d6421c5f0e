"""Instructions in errors and notes, in the syntax that the reader uses."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from typing import Any


class Syntax(StrEnum):
    """The place of settings: a schema, a schema for a prediction, keywords of Python, or flags of the command.

    A prediction needs the run's columns: its schema may fill in missing values or drop rows, but not add numbers.
    """

    SCHEMA = "schema"
    PREDICTION = "prediction"
    PYTHON = "python"
    FLAGS = "flags"

    def entry(self, column: str, entry: str, value: Any) -> str:
        """Return the setting for an entry of a column, as ``--set age.fill=50``."""
        match self:
            case Syntax.FLAGS:
                said = value if isinstance(value, str) else json.dumps(value)
                return f"--set {shlex.quote(f'{column}.{entry}={said}')}"
            case Syntax.PYTHON:
                return f"columns={{{column!r}: {{{entry!r}: {value!r}}}}}"
        said = f"{entry} = {json.dumps(value)} for the column {column!r}"
        if self is Syntax.PREDICTION:
            return f"{said} in a schema (umbel data show DATASET --schema > FILE, then --schema FILE)"
        return said

    def missing(self, how: str) -> str:
        """Return the setting for rows with missing values, as ``--missing drop``."""
        return {"flags": f"--missing {how}", "python": f"missing={how!r}"}.get(self, f'missing = "{how}"')
