"""Import a DataFrame, with a given schema, or with types and categories inferred from the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from umbel.data import Schema
from umbel.data.data import check_printable
from umbel.data.hints import Syntax
from umbel.data.importers.client_data import ClientData, Partitioner, Share, names_dealt, split_into_clients
from umbel.data.importers.report import look, suggest
from umbel.data.table import Rows, encode
from umbel.protocol.errors import DatasetError
from umbel.protocol.plugins import trust


def from_dataframe(
    frame: pd.DataFrame,
    *,
    client: str | Partitioner | None = None,
    target: str | None = None,
    features: Sequence[str] | None = None,
    columns: Mapping[str, Mapping[str, Any]] | None = None,
    schema: Schema | Path | str | None = None,
    missing: str = "refuse",
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
    few values, or with a leading zero, look like codes and become categories too, and a note says so. A number with
    a minimum and a maximum, and no given scale is scaled to -1 to 1. For a target of
    numbers the loss is ``mse``, for categories ``cross-entropy``, and for a boolean, stored as -1 and 1, ``log``.
    All columns are looked at before anything is refused, and an error names all faults.

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
            fix = "a partitioner, as client=umbel.Uniform(20)" if syntax is Syntax.PYTHON else "--clients NUMBER"
            raise DatasetError(f"the schema has no client: give {fix}", code="data.client-column")
        syntax = Syntax.SCHEMA if syntax is Syntax.PYTHON else syntax
        notes = []
    else:
        if target is None or client is None:
            raise DatasetError("name the client's and the target's column, or give a schema", code="data.no-target")
        dealt = isinstance(client, Partitioner)
        options: dict[str, Any] = {"missing": missing, "dealt": dealt}
        column = None if isinstance(client, Partitioner) else client
        report = look(frame, column, target, features, given, source, syntax, **options | entries)
        report.check(source, syntax)
        frame, what, notes = report.frame, report.schema, report.notes
    rows = encode(frame, what, source, syntax=syntax)
    if not len(rows.targets):
        raise DatasetError(f"{source}: no rows are left; repair the table or the schema", code="data.no-rows")
    check_printable([what.entries(), list(map(str, dict.fromkeys(rows.clients)))], source)
    notes += rows.notes
    owners: Any = rows.clients
    if isinstance(client, Partitioner):
        owners = names_dealt(client, rows.targets)
    split |= {"name": what.name or "data"}
    _check_precision(rows, what, source, syntax)
    return split_into_clients(rows.features, rows.targets, owners, notes=notes, **what.said | split)


def _check_precision(rows: Rows, schema: Schema, source: Any, syntax: Syntax) -> None:
    """Raise `DatasetError` if a dataset, which holds 32 bits a number, would lose the differences in a column."""
    if not rows.blurred:
        return
    column = rows.blurred[0]
    entries = ("scale",) if column is schema.target else ("span",) if column.type == "date" else ("offset", "scale")
    fix = " and ".join(syntax.entry(column.name, entry, 1000) for entry in entries)
    wrong = f"{source}: numbers of {column.name} are so close to one another, or so small, that 32 bits lose"
    raise DatasetError(f"{wrong} their differences; bring them near 1, as by {fix}", code="data.precision")
