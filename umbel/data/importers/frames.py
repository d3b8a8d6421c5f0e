"""From a DataFrame to a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from umbel.data import Schema
from umbel.data.importers.arrays import from_arrays, numbered
from umbel.data.importers.client_data import ClientData, Share, split_into_clients
from umbel.data.importers.infer import infer, standardised, suggest
from umbel.data.importers.partition import Partitioner
from umbel.data.table import encode
from umbel.protocol.errors import DatasetError


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
        ``{"cost": {"scale": 10_000, "unit": "dollars"}, "ward": {"categories": True}}``.
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
        What the table is called in errors.
    **entries
        Of the manifest: ``name``, ``model``, ``loss``, ``metric``, ``provenance`` and so on.

    Returns
    -------
    ClientData

    Raises
    ------
    DatasetError
        When the table does not fit; the text names the column, the row and the fix.
    """
    dealt = isinstance(client, Partitioner)
    split: dict[str, Any] = {"validation": validation, "test": test, "seed": seed}
    if schema is None:
        if target is None or client is None:
            raise DatasetError("name the client's and the target's column, or give a schema", code="data.no-target")
        column = None if isinstance(client, Partitioner) else client
        if features is not None and len(features) == 1 and _is_sequence(frame, features[0]):
            if columns or standardise or missing != "refuse":
                raise DatasetError(
                    f"{features[0]} holds sequences, of which columns, standardise and missing say nothing",
                    code="data.schema-clash",
                )
            return _sequences(frame, features[0], target, client, split | entries)
        what = infer(
            frame,
            client=column,
            target=target,
            features=features,
            columns=columns,
            source=source,
            missing=missing,
            **entries,
        )
    elif features or columns or target is not None or isinstance(client, str) or missing != "refuse":
        raise DatasetError(
            "a schema says all of client, target, features, columns and missing: give it, or those",
            code="data.schema-clash",
        )
    else:
        what = schema if isinstance(schema, Schema) else Schema.read(Path(schema))
        what = suggest(Schema(**what.model_dump() | {key: value for key, value in entries.items() if value}))
        if what.client is None and not dealt:
            raise DatasetError(
                "the schema has no client, and the table would be one client's: give a partitioner",
                code="data.client-column",
            )

    found = _found(what, columns or {}) if schema is None else []
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
    what = standardised(what, frame.iloc[kept], source).model_copy(update={"provenance": provenance})
    rows = encode(frame, what, source)
    return split_into_clients(rows.features, rows.targets, owners, notes=notes, **what.said | split)


def _found(schema: Schema, given: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the columns whose categories were not listed."""
    listed = [name for name, column in given.items() if isinstance(column.get("categories"), list)]
    columns = [*schema.features, schema.target]
    return [column.name for column in columns if column.type == "category" and column.name not in listed]


def _is_sequence(frame: pd.DataFrame, name: str) -> bool:
    return name in frame.columns and len(frame) > 0 and isinstance(frame[name].iloc[0], (list, tuple, np.ndarray))


def _sequences(
    frame: pd.DataFrame, name: str, target: str, client: str | Partitioner, options: dict[str, Any]
) -> ClientData:
    for column in (target, *([client] if isinstance(client, str) else [])):
        if column not in frame.columns:
            raise DatasetError(
                f"the table has no column {column!r}; it has {', '.join(map(str, frame.columns))}",
                code="data.missing-column",
            )
    targets = stacked(frame[target], target) if _is_sequence(frame, target) else frame[target].to_numpy()
    owners = frame[client].to_numpy() if isinstance(client, str) else client
    return from_arrays(stacked(frame[name], name), targets, client=owners, **options)


def stacked(rows: Any, name: str) -> np.ndarray[Any, Any]:
    """Return rows of one length as an array."""
    parts = [np.asarray(row) for row in rows]
    if len(shapes := sorted({part.shape for part in parts})) > 1:
        raise DatasetError(
            f"rows of {name} differ in shape, as {shapes[0]} and {shapes[-1]}; pad or cut them to one",
            code="data.shape",
        )
    return np.stack(parts)
