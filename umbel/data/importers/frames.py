"""From a DataFrame to a dataset, with a schema that is given, or types and categories as the values suggest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from umbel.data import Column, Schema
from umbel.data.importers.arrays import from_arrays, numbered
from umbel.data.importers.client_data import ClientData, Share, split_into_clients
from umbel.data.importers.partition import Partitioner
from umbel.data.table import FALSE, TRUE, as_numbers, as_texts, column_in, encode, missing_in
from umbel.protocol.errors import DatasetError

MOST_CATEGORIES = 100
"""A column of more different texts is taken for names or free text."""

LOSS = {"number": "mse", "integer": "mse", "boolean": "log", "category": "cross-entropy"}
"""The loss that suits a target of each type."""


def from_dataframe(
    frame: pd.DataFrame,
    *,
    client: str | Partitioner | None = None,
    target: str | None = None,
    features: Sequence[str] | None = None,
    columns: Mapping[str, Mapping[str, Any]] | None = None,
    schema: Schema | Path | str | None = None,
    missing: str = "refuse",
    standardise: bool = False,
    validation: Share = 0.2,
    test: Share = 0.0,
    seed: int = 0,
    source: Any = "the table",
    **entries: Any,
) -> ClientData:
    """Split the rows of a table into clients.

    Numbers become numbers, booleans 0 and 1, and a text one column of 0 and 1 for each of its
    categories. A target of numbers is predicted with the loss ``mse``, one of categories with
    ``cross-entropy``, and a boolean, as -1 and 1, with ``log``.

    Parameters
    ----------
    frame : DataFrame
    client : str or Partitioner
        The column of each row's client, or a partitioner that assigns rows to clients.
    target : str
        The column that is predicted.
    features : sequence of str, optional
        The columns that it is predicted from; by default all others. A single column of lists or arrays
        is a sequence, as in `umbel.from_arrays`, whose options are then taken as well.
    columns : mapping, optional
        What is not to be guessed: entries of `dataset.Column` by column, as
        ``{"cost": {"scale": 10_000, "unit": "dollars"}, "ward": {"categories": True}}``. True takes the
        categories that are found.
    schema : Schema or path, optional
        What the columns are, in place of all that.
    missing : str
        What becomes of a row without a value: ``refuse`` the table, or ``drop`` the row.
    standardise : bool
        Whether numbers without a scale get one, and features an offset, from the training clients'
        rows. These are statistics of the data: fine in simulation, a leak at real sites.
    validation, test : float or sequence of str
        Which clients only validate, and which take part in no run: a share, or their names.
    seed : int
        Of the order of the clients, and so of the split.
    source : object
        Name of the table in errors.
    **entries
        Of the manifest: ``name``, ``model``, ``loss``, ``metric``, ``provenance`` and so on.

    Raises
    ------
    DatasetError
        When the table does not fit; the text names the column, the row and the fix.
    """
    split: dict[str, Any] = {"validation": validation, "test": test, "seed": seed}
    given = {name: dict(column) for name, column in (columns or {}).items()}
    if schema is not None:
        if features or columns or target is not None or isinstance(client, str) or missing != "refuse":
            wrong = "a schema says all of client, target, features, columns and missing"
            raise DatasetError(f"{wrong}: give it, or those", code="data.schema-clash")
        what = schema if isinstance(schema, Schema) else Schema.read(Path(schema))
        what = suggest(Schema(**what.model_dump() | {key: value for key, value in entries.items() if value}))
        if what.client is None and client is None:
            raise DatasetError("the schema has no client: give a partitioner", code="data.client-column")
        notes = []
    else:
        if target is None or client is None:
            raise DatasetError("name the client's and the target's column, or give a schema", code="data.no-target")
        if features is not None and len(features) == 1 and _is_sequence(frame, features[0]):
            if columns or standardise or missing != "refuse":
                fix = "leave out columns, standardise and missing"
                raise DatasetError(f"{features[0]} holds sequences: {fix}", code="data.schema-clash")
            return _sequences(frame, features[0], target, client, split | entries)
        column = None if isinstance(client, Partitioner) else client
        what = _infer(frame, column, target, features, given, source, {"missing": missing} | entries)
        listed = [name for name, one in given.items() if isinstance(one.get("categories"), list)]
        found = [one.name for one in (*what.features, what.target) if one.type == "category" and one.name not in listed]
        notes = [f"The categories of {name} were found in the rows: real sites need a public list." for name in found]
    rows = encode(frame, what, source)
    if not len(rows.targets):
        raise DatasetError(f"{source}: no row is left; repair the table or the schema", code="data.no-rows")
    notes += [f"Rows left out: {count:,}, because {reason}." for reason, count in rows.left_out.items()]
    owners: Any = rows.clients
    if isinstance(client, Partitioner):
        owners = numbered(client.deal(len(rows.targets), rows.targets))
    split |= {"name": what.name or "data"}
    data = split_into_clients(rows.features, rows.targets, owners, notes=notes, **what.said | split)
    if not standardise:
        return data
    training = set(data.dataset.names[: data.manifest.train])
    kept = rows.places[[str(one) in training for one in owners]]
    notes.append(
        "Numbers are scaled by statistics of the training clients' rows: fine in simulation, a leak at real sites, "
        "whose schema needs public constants."
    )
    provenance = f"{what.provenance} {notes[-1]}".strip()
    what = _standardised(what, frame.iloc[kept]).model_copy(update={"provenance": provenance})
    rows = encode(frame, what, source)
    return split_into_clients(rows.features, rows.targets, owners, notes=notes, **what.said | split)


def _is_sequence(frame: pd.DataFrame, name: str) -> bool:
    return name in frame.columns and len(frame) > 0 and isinstance(frame[name].iloc[0], (list, tuple, np.ndarray))


def _sequences(
    frame: pd.DataFrame, name: str, target: str, client: str | Partitioner, options: dict[str, Any]
) -> ClientData:
    columns_there(frame.columns, [target, *([client] if isinstance(client, str) else [])], "the table")
    targets = stacked(frame[target], target) if _is_sequence(frame, target) else frame[target].to_numpy()
    owners = frame[client].to_numpy() if isinstance(client, str) else client
    return from_arrays(stacked(frame[name], name), targets, client=owners, **options)


def stacked(rows: Any, name: str) -> np.ndarray[Any, Any]:
    """Return rows of one length as an array."""
    parts = [np.asarray(row) for row in rows]
    if len(shapes := sorted({part.shape for part in parts})) > 1:
        told = f"{shapes[0]} and {shapes[-1]}"
        raise DatasetError(f"rows of {name} differ in shape, as {told}; pad or cut them to one", code="data.shape")
    return np.stack(parts)


def columns_there(there: Iterable[Any], names: Iterable[str], source: Any) -> None:
    """Raise `DatasetError` unless all names are among the columns that are there."""
    known = list(there)
    if absent := [name for name in names if name not in known]:
        told = ", ".join(map(str, known))
        raise DatasetError(f"{source} has no column {absent[0]!r}; it has {told}", code="data.missing-column")


# --- the schema of a table that has none


def _infer(
    frame: pd.DataFrame,
    client: str | None,
    target: str,
    features: Sequence[str] | None,
    given: dict[str, dict[str, Any]],
    source: Any,
    entries: Mapping[str, Any],
) -> Schema:
    """Return a schema that fits a table; see `from_dataframe`."""
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DatasetError(f"{source} has two columns called {twice!r}", code="data.twice")
    chosen = [name for name in frame.columns if name not in (client, target)] if features is None else list(features)
    columns_there(frame.columns, [*chosen, target, *([client] if client else []), *given], source)
    if target in chosen:
        raise DatasetError(f"{target!r} is the target, and cannot be a feature as well", code="data.no-target")
    if not chosen:
        raise DatasetError(f"{source} has no column to predict {target!r} from", code="data.missing-column")
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
    model = schema.model or f"linear inputs={inputs} outputs={outputs}"
    return schema.model_copy(update={"model": model, "loss": schema.loss or LOSS[schema.target.type]})


def _standardised(schema: Schema, frame: pd.DataFrame) -> Schema:
    """Return the schema with scale and offset of its numbers from the table's own rows, to two digits."""

    def scaled(column: Column) -> Column:
        if column.type not in ("number", "integer") or (column.scale, column.offset) != (1, 0):
            return column
        values = as_numbers(column_in(frame, column))
        rows = values[np.isfinite(values)]
        offset = 0.0 if column is schema.target else _two_digits(rows.mean())
        scale = _two_digits(np.sqrt(np.mean((rows - offset) ** 2)))
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
    """Return the type that a column's values suggest."""
    if pd.api.types.is_bool_dtype(series):
        return "boolean"
    if pd.api.types.is_datetime64_any_dtype(series):
        fix = "make a number of it, as days since one, or leave it out"
        raise DatasetError(f"{source}: {name} holds dates; {fix}", code="data.dates")
    there = series[~missing_in(series)]
    numbers = as_numbers(there)
    if set(np.unique(numbers)) == {0.0, 1.0}:
        return "boolean"
    # A few texts among numbers are faults, which are named when the table is read.
    if len(there) == 0 or np.isfinite(numbers).mean() > 0.5:
        return "number"
    return "boolean" if as_texts(there).str.lower().isin((*TRUE, *FALSE)).all() else "category"


def _found(series: pd.Series, column: Column, source: Any) -> list[str]:
    """Return the categories in a column, numbers by size and before texts."""
    texts = as_texts(series[~missing_in(series)], column.pattern)
    found: list[str] = sorted(texts.unique().tolist(), key=_natural)
    if len(found) > MOST_CATEGORIES:
        wrong = f"{source}: {column.name} has {len(found)} different texts, as {found[0]!r}, too many for categories"
        fix = "leave the column out, list its categories, or write numbers with a decimal point and no unit"
        raise DatasetError(f"{wrong}; {fix}", code="data.categories")
    return found or ["?"]


def _natural(text: str) -> tuple[int, float, str]:
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
