"""Import a DataFrame, with a given schema, or with types and categories inferred from the values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from umbel.data import Column, Schema
from umbel.data.data import check_printable
from umbel.data.hints import Syntax
from umbel.data.importers.client_data import ClientData, Partitioner, Share, names_dealt, split_into_clients
from umbel.data.importers.ranges import scaled
from umbel.data.table import FALSE, ISO_DATE, TRUE, Rows, as_numbers, as_texts, encode, missing_in
from umbel.protocol.errors import DatasetError
from umbel.protocol.plugins import trust

MOST_CATEGORIES = 100
"""A text column with more distinct values counts as names or free text."""

MOST_CODES, ROWS_A_CODE, ROUND = 20, 10, 5
"""Integers count as codes if there are at most so many of them, each in so many rows on average, and they are not all
multiples of a number from `ROUND` on."""

_AMOUNT = re.compile(
    r"(?:[+\u2212-]|\((?=.*\)))?[$€£¥]? ?(?:\d+(?:[.,]\d+)?|\d{1,3}(?:[.' ]\d{3})+(?:,\d+)?) ?[%$€£¥]?[)-]?"
)
"""A number with a decimal comma, with other signs between thousands, with a unit, or with an accountant's minus."""

_DATE = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}(?:[T ].*)?")
"""A date in any order of day, month and year."""

_PADDED = r"0\d+"
"""An integer with a leading zero, as codes such as ZIP codes have; a number would lose it."""

_OF_NUMBERS = {"scale", "offset", "minimum", "maximum"}
"""Entries that mark a column as amounts, even if its few values look like codes."""

LOSS = {"number": "mse", "integer": "mse", "boolean": "log", "category": "cross-entropy"}
"""The default loss for a target of each type."""


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
    syntax: Syntax = Syntax.PYTHON,
    **entries: Any,
) -> ClientData:
    """Split the rows of a table into clients.

    A number stays a number, a boolean becomes 0 or 1, and a text becomes one column of 0 and 1 for each
    of its categories. A date becomes its year, month, weekday, and days since a public date. Integers of
    few values, or with a leading zero, look like codes and become categories too, and a note says so. For a target of
    numbers the loss is ``mse``, for categories ``cross-entropy``, and for a boolean, stored as -1 and 1, ``log``.

    Parameters
    ----------
    frame : DataFrame
    client : str or Partitioner
        The column of each row's client, or a partitioner that assigns rows to clients.
    target : str
        The column to predict.
    features : sequence of str, optional
        The columns to predict it from; by default all others.
    columns : mapping, optional
        Entries of `dataset.Column` by column, which replace guesses, as in
        ``{"cost": {"scale": 10_000, "unit": "dollars"}, "ward": {"categories": True}}``. True means the
        categories in the rows.
    schema : Schema or path, optional
        A description of the columns, which replaces the parameters above and `missing`.
    missing : str
        Treatment of a missing value: ``refuse`` the table, ``drop`` the row, or ``indicate`` it: a
        feature with missing values gets an extra number, 1 where the value is missing.
    standardise : bool
        Whether to scale numbers with a minimum and a maximum to the range from -1 to 1.
    validation, test : float or sequence of str
        Clients that only validate, and clients outside all runs: each a share, or names.
    seed : int
        Seed of the clients' order, which decides the split.
    source : object
        Name of the table, for errors.
    syntax : Syntax
        Syntax of the settings that errors and notes name.
    **entries
        Entries of the manifest: ``name``, ``model``, ``loss``, ``metric``, ``provenance`` and so on.

    Raises
    ------
    DatasetError
        If the table does not fit; the text names the column, the row and the fix.
    """
    trust(*(entries.get(key) for key in ("model", "loss", "metric")))
    split: dict[str, Any] = {"validation": validation, "test": test, "seed": seed}
    given = {name: dict(column) for name, column in (columns or {}).items()}
    if schema is not None:
        if features or columns or target is not None or isinstance(client, str) or missing != "refuse":
            wrong = "a schema replaces client, target, features, columns and missing"
            raise DatasetError(f"{wrong}; give it, or those", code="data.schema-clash")
        what = schema if isinstance(schema, Schema) else Schema.read(Path(schema))
        what = suggest(Schema(**what.model_dump() | {key: value for key, value in entries.items() if value}))
        if what.client is None and client is None:
            fix = "--clients NUMBER" if syntax is Syntax.FLAGS else "a partitioner, as client=umbel.Uniform(20)"
            raise DatasetError(f"the schema has no client: give {fix}", code="data.client-column")
        syntax = Syntax.SCHEMA
        notes = []
    else:
        if target is None or client is None:
            raise DatasetError("name the client's and the target's column, or give a schema", code="data.no-target")
        column = None if isinstance(client, Partitioner) else client
        what = _infer(frame, column, target, features, given, source, {"missing": missing} | entries)
        notes = _told(what, frame, given, syntax)
    what = scaled(what) if standardise else what
    rows = encode(frame, what, source, syntax=syntax)
    if not len(rows.targets):
        raise DatasetError(f"{source}: no rows are left; repair the table or the schema", code="data.no-rows")
    check_printable([what.entries(), list(map(str, dict.fromkeys(rows.clients)))], source)
    notes += [f"Rows left out: {count:,}, because {reason}." for reason, count in rows.left_out.items()]
    notes += _constant(rows, what)
    owners: Any = rows.clients
    if isinstance(client, Partitioner):
        owners = names_dealt(client, rows.targets)
    split |= {"name": what.name or "data"}
    _check_precision(rows, what, source, syntax)
    return split_into_clients(rows.features, rows.targets, owners, notes=notes, **what.said | split)


def columns_there(there: Iterable[Any], names: Iterable[str], source: Any) -> None:
    """Raise `DatasetError` unless all names are columns of the table."""
    known = list(there)
    if absent := [name for name in names if name not in known]:
        told = ", ".join(map(str, known))
        raise DatasetError(f"{source} has no column {absent[0]!r}; it has {told}", code="data.missing-column")


# --- inferring a schema


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
        raise DatasetError(f"{target!r} is the target, and cannot also be a feature", code="data.no-target")
    if not chosen:
        raise DatasetError(f"{source} has no column to predict {target!r} from", code="data.missing-column")
    for name in (*chosen, target, *([client] if client is not None else [])):
        if not isinstance(name, str):
            wrong = f"{source} has the column {name!r}, whose name is no text"
            raise DatasetError(f"{wrong}; rename it, as by frame.columns.map(str)", code="data.column-name")
    indicate = entries.get("missing") == "indicate"
    lacking = {name for name in chosen if indicate and missing_in(frame[name], _listed(given.get(name, {}))).any()}
    own = {
        name: {"missing": "indicate"} | given.get(name, {}) if name in lacking else given.get(name, {})
        for name in chosen
    }
    whole = Schema(
        client=Column(name=client, **({"type": "text"} | given.get(client, {}))) if client else None,
        target=_column(frame, target, given.get(target, {}), source, is_target=True),
        features=[_column(frame, name, own[name], source) for name in chosen],
        **{**entries, "missing": "refuse"} if indicate else entries,
    )
    return suggest(whole)


def _listed(entries: Mapping[str, Any]) -> list[str]:
    """Return the categories that a column's entries list."""
    listed = entries.get("categories")
    return listed if isinstance(listed, list) else []


def _told(schema: Schema, frame: pd.DataFrame, given: dict[str, dict[str, Any]], syntax: Syntax) -> list[str]:
    """Return a note for each guess, with the setting that overrides it."""
    notes = []
    for column in (*schema.features, schema.target):
        name, said = column.name, given.get(column.name, {})
        if column.type == "category" and not _listed(said):
            numbers = as_numbers(frame[name][~missing_in(frame[name])])
            if not {"categories", "type"} & said.keys() and np.isfinite(numbers).all():
                few = f"{name} holds {len(column.categories)} different whole numbers, read as codes of categories"
                notes.append(f"{few}; if they are amounts: {syntax.entry(name, 'type', 'number')}.")
            dates = [text for text in column.categories if _DATE.fullmatch(text)]
            if "type" not in said and 2 * len(dates) > len(column.categories):
                own = f"{syntax.entry(name, 'type', 'date')} {syntax.entry(name, 'format', '%d.%m.%Y')}"
                notes.append(f"{name} holds dates, as {dates[0]!r}, read as categories; with their format: {own}.")
            notes.append(f"The categories of {name} come from the rows; real sites need a public list.")
        if column.type == "boolean" and column is schema.target:
            notes.append(f"The target's false and true are stored as -1 and 1, for the loss {schema.loss}.")
        if column.is_far and not {"since", "span"} & said.keys():
            closer = f"{syntax.entry(name, 'since', '2024-01-01')} {syntax.entry(name, 'span', 365)}"
            unit = f"in units of {column.span:g} days"
            notes.append(f"Dates of {name} count from {column.since}, {unit}; give a date near yours: {closer}.")
        if column.missing == "indicate" and "missing" not in said:
            notes.append(
                f"{name} lacks values in these rows, and an extra feature marks them; real sites need that feature too."
            )
    return notes


def _constant(rows: Rows, schema: Schema) -> list[str]:
    """Return notes about columns with a single value."""
    ends = np.cumsum([len(column.stored) for column in schema.features])[:-1]
    parts = zip(schema.features, np.split(rows.features, ends, axis=1), strict=True)
    notes = []
    if names := [column.name for column, numbers in parts if (numbers == numbers[0]).all()]:
        notes.append(f"Nothing is learnt from columns with a single value; leave them out: {', '.join(names)}.")
    if (rows.targets == rows.targets[0]).all():
        notes.append(f"The target {schema.target.name} has a single value, so there is nothing to predict.")
    return notes


def _check_precision(rows: Rows, schema: Schema, source: Any, syntax: Syntax) -> None:
    """Raise `DatasetError` if a dataset, which holds 32 bits a number, would lose the differences in a column."""
    if not rows.blurred:
        return
    column = rows.blurred[0]
    entries = ("scale",) if column is schema.target else ("span",) if column.type == "date" else ("offset", "scale")
    fix = " and ".join(syntax.entry(column.name, entry, 1000) for entry in entries)
    wrong = f"{source}: numbers of {column.name} are so close to one another, or so small, that 32 bits lose"
    raise DatasetError(f"{wrong} their differences; bring them near 1, as by {fix}", code="data.precision")


def suggest(schema: Schema) -> Schema:
    """Return the schema with a model and a loss for its target, unless it names them.

    The model is linear: a release costs privacy for each parameter, and a linear model has the fewest.
    """
    inputs = sum(len(column.stored) for column in schema.features)
    outputs = len(schema.target.classes) if schema.target.type == "category" else 1
    model = schema.model or f"linear inputs={inputs} outputs={outputs}"
    return schema.model_copy(update={"model": model, "loss": schema.loss or LOSS[schema.target.type]})


def _column(frame: pd.DataFrame, name: str, given: dict[str, Any], source: Any, is_target: bool = False) -> Column:
    series, entries = frame[name], dict(given)
    found = entries.get("categories") is True
    if "type" not in entries:
        if {"categories", "encode"} & entries.keys():
            entries["type"] = "category"
        else:
            kind = _guess(series, name, source, is_target)
            amount = kind in ("category", "boolean") and _OF_NUMBERS & entries.keys()
            entries["type"] = "number" if amount else kind
    if found or (entries["type"] == "category" and "categories" not in entries):
        checked = Column(name=name, **(entries | {"categories": ["?"]}))
        entries["categories"] = _found(series, checked, source)
    return Column(name=name, **entries)


def _guess(series: pd.Series, name: str, source: Any, is_target: bool) -> str:
    """Return the type that a column's values suggest."""
    if len(series) and isinstance(series.iloc[0], (list, tuple, np.ndarray)):
        fix = "give each of its numbers as a column, or the arrays to from_arrays"
        raise DatasetError(f"{source}: {name} holds lists; {fix}", code="data.vectors")
    if pd.api.types.is_bool_dtype(series):
        return "boolean"
    if pd.api.types.is_datetime64_any_dtype(series):
        return "date"
    there = series[~missing_in(series)]
    numbers, texts = as_numbers(there), as_texts(there)
    if _padded(texts):
        return "category"
    if set(np.unique(numbers)) in ({0.0, 1.0}, {-1.0, 1.0}):
        return "boolean"
    # A few texts among numbers are faults, and so are decimal commas and units; reading the table names them.
    if len(there) == 0 or (np.isfinite(numbers) | texts.str.fullmatch(_AMOUNT)).mean() > 0.5:
        return "category" if _codes(numbers, is_target) else "number"
    if texts.str.fullmatch(ISO_DATE).mean() > 0.5:
        return "date"
    known = {*texts.str.lower()}
    # N and F are two values, although both are texts of false.
    two = len(known) == 1 or not (known.isdisjoint(TRUE) or known.isdisjoint(FALSE))
    return "boolean" if known <= {*TRUE, *FALSE} and two else "category"


def _padded(texts: pd.Series) -> bool:
    """Return whether texts are digits alone, and a leading zero says that they are codes."""
    return bool(texts.str.fullmatch(_PADDED).any() and texts.str.fullmatch(r"\d+").all())


def _codes(numbers: NDArray[np.float64], is_target: bool) -> bool:
    """Return whether numbers look like codes: few distinct integers, each frequent.

    Amounts count from 0, or are round numbers such as 5, 10 and 20. A target may count from 0, as classes do.
    """
    values = np.unique(numbers)
    few = 2 <= len(values) <= MOST_CODES and len(numbers) >= ROWS_A_CODE * len(values)
    if not few or not (np.isfinite(values).all() and (values % 1 == 0).all() and values[0] >= 0):
        return False
    if math.gcd(*map(int, values)) >= ROUND:  # 64 bits may be too few
        return False
    return is_target or not np.array_equal(values, np.arange(len(values)))


def _found(series: pd.Series, column: Column, source: Any) -> list[str]:
    """Return the categories in a column: numbers by size, then texts."""
    texts = as_texts(series[~missing_in(series)], column.pattern)
    found: list[str] = sorted(texts.unique().tolist(), key=_natural)
    if len(found) > MOST_CATEGORIES:
        wrong = f"{source}: {column.name} has {len(found)} different texts, as {found[0]!r}, too many for categories"
        fix = (
            "leave the column out, list its categories, set its type to number if its digits are amounts, "
            "write numbers with a decimal point and no unit, or dates as 2024-01-31; for other dates "
            "set the column's type to date, and its format, as %d.%m.%Y"
        )
        raise DatasetError(f"{wrong}; {fix}", code="data.categories")
    return found or ["?"]


def _natural(text: str) -> tuple[int, float, str]:
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
