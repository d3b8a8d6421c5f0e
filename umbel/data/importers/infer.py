"""The schema of a table that has none: types as the values suggest, categories as they are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from umbel.data import Column, Schema
from umbel.data.table import FALSE, TRUE, as_numbers, as_texts, column_in, missing_in
from umbel.protocol.errors import DatasetError

MOST_CATEGORIES = 100
"""A column of more different texts is taken for names or free text."""

LOSS = {"number": "mse", "integer": "mse", "boolean": "log", "category": "cross-entropy"}
"""The loss that suits a target of each type."""


def infer(
    frame: pd.DataFrame,
    *,
    client: str | None,
    target: str,
    features: Sequence[str] | None = None,
    columns: Mapping[str, Mapping[str, Any]] | None = None,
    source: Any = "the table",
    **entries: Any,
) -> Schema:
    """Return a schema that fits the table.

    Parameters
    ----------
    frame : DataFrame
    client : str, optional
        The column of clients.
    target : str
        The column that is predicted.
    features : sequence of str, optional
        The columns that it is predicted from; by default all others.
    columns : mapping, optional
        Entries of `dataset.Column` by column, for what is not to be guessed. ``categories`` may be
        True, for a category of those that are found.
    source : object
        What the table is called in errors.
    **entries
        Of the schema.

    Raises
    ------
    DatasetError
        When a column is missing, or holds neither numbers nor a few categories.
    """
    given = {name: dict(column) for name, column in (columns or {}).items()}
    if not frame.columns.is_unique:
        raise DatasetError(
            f"{source} has two columns called {frame.columns[frame.columns.duplicated()][0]!r}", code="data.twice"
        )
    chosen = [name for name in frame.columns if name not in (client, target)] if features is None else list(features)
    named = [*chosen, target, *([client] if client else []), *given]
    if absent := [name for name in named if name not in frame.columns]:
        raise DatasetError(
            f"{source} has no column {absent[0]!r}; it has {', '.join(map(str, frame.columns))}",
            code="data.missing-column",
        )
    if target in chosen:
        raise DatasetError(f"{target!r} is the target, and cannot be a feature as well", code="data.no-target")
    if not chosen:
        raise DatasetError(
            f"{source} has no column left to predict {target!r} from; name features", code="data.missing-column"
        )
    whole = Schema(
        client=Column(name=client, **({"type": "text"} | given.get(client, {}))) if client else None,
        target=_column(frame, target, given.get(target, {}), source),
        features=[_column(frame, name, given.get(name, {}), source) for name in chosen],
        **entries,
    )
    return suggest(whole)


def suggest(schema: Schema) -> Schema:
    """Return the schema with a model and a loss for its target, where it names none.

    The model is linear: a client's release costs privacy by the parameter, and this has the fewest.
    """
    inputs = sum(len(column.stored) for column in schema.features)
    outputs = len(schema.target.classes) if schema.target.type == "category" else 1
    own = {
        "model": schema.model or f"linear inputs={inputs} outputs={outputs}",
        "loss": schema.loss or LOSS[schema.target.type],
    }
    return schema.model_copy(update=own)


def standardised(schema: Schema, frame: pd.DataFrame, source: Any) -> Schema:
    """Return the schema with scale and offset of its numbers from the table's own rows, to two digits.

    A statistic of the rows tells of them: it is for simulation, and no schema to hand to sites.
    """

    def scaled(column: Column) -> Column:
        if column.type not in ("number", "integer") or (column.scale, column.offset) != (1, 0):
            return column
        values = as_numbers(column_in(frame, column))
        rows = values[np.isfinite(values)]
        is_target = column is schema.target
        offset = 0.0 if is_target else _two_digits(float(rows.mean()))
        scale = _two_digits(float(np.sqrt(np.mean((rows - offset) ** 2))))
        return column.model_copy(update={"offset": offset, "scale": scale or 1.0})

    features = [scaled(column) for column in schema.features]
    return schema.model_copy(update={"features": features, "target": scaled(schema.target)})


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _column(frame: pd.DataFrame, name: str, given: dict[str, Any], source: Any) -> Column:
    series, entries = frame[name], dict(given)
    found = entries.get("categories") is True
    if "type" not in entries:
        entries["type"] = "category" if "categories" in entries else _guess(series, name, source)
    if found or (entries["type"] == "category" and "categories" not in entries):
        checked = Column(name=name, **(entries | {"categories": ["?"]}))
        entries["categories"] = _found(series, checked, source)
    return Column(name=name, **entries)


def _guess(series: pd.Series, name: str, source: Any) -> str:
    if pd.api.types.is_bool_dtype(series):
        return "boolean"
    if pd.api.types.is_datetime64_any_dtype(series):
        raise DatasetError(
            f"{source}: {name} holds dates; make a number of it, as days since one, or leave it out", code="data.dates"
        )
    there = series[~missing_in(series)]
    numbers = as_numbers(there)
    if set(np.unique(numbers)) == {0.0, 1.0}:
        return "boolean"
    # A few texts among numbers are faults, which are named when the table is read.
    if len(there) == 0 or np.isfinite(numbers).mean() > 0.5:
        return "number"
    return "boolean" if as_texts(there).str.lower().isin((*TRUE, *FALSE)).all() else "category"


def _found(series: pd.Series, column: Column, source: Any) -> list[str]:
    there = series[~missing_in(series)]
    texts = as_texts(there, column.pattern)
    found: list[str] = sorted(texts.unique().tolist(), key=_natural)
    if len(found) > MOST_CATEGORIES:
        raise DatasetError(
            f"{source}: {column.name} has {len(found)} different texts, as {found[0]!r}, too many for categories; "
            "leave the column out, list its categories, or, if it holds numbers, write them with a decimal point and "
            "no unit",
            code="data.categories",
        )
    return found or ["?"]


def _natural(text: str) -> tuple[int, float, str]:
    """Sort numbers by what they are worth, and before texts."""
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
