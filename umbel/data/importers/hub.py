"""Import a Hugging Face data set (the library `datasets`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from umbel.data.importers.arrays import from_arrays
from umbel.data.importers.client_data import ClientData, numbered
from umbel.data.importers.frames import from_dataframe
from umbel.data.importers.report import columns_there
from umbel.protocol.errors import DatasetError


def from_datasets(
    dataset: Any, *, client: Any, target: str | None, features: str | Sequence[str] | None = None, **options: Any
) -> ClientData:
    """Split a Hugging Face data set into clients.

    Parameters
    ----------
    dataset : datasets.Dataset
        One split, such as ``load_dataset(...)["train"]``.
    client : str or Partitioner
        The column of each row's client; or a partitioner that assigns rows to clients, from umbel or from
        ``flwr_datasets.partitioner``.
    target : str, optional
        The column to predict; None for sequences of tokens, to predict the next one.
    features : str or sequence of str, optional
        The columns to predict it from, by default all others: numbers, booleans and texts of a few
        categories, or one column of images or of sequences of one length.
    **options
        See `umbel.from_arrays` for images and sequences, and `umbel.from_dataframe` for the rest.

    Raises
    ------
    DatasetError
        If the columns do not fit.
    """
    if isinstance(dataset, dict):
        one = next(iter(dataset))
        raise DatasetError(f"this is a dictionary of data sets: give one, as dataset[{one!r}]", code="data.one-split")
    dealt = hasattr(client, "load_partition")
    column = client if isinstance(client, str) else None
    names = list(dataset.column_names)
    chosen = [features] if isinstance(features, str) else features
    chosen = [name for name in names if name not in (column, target)] if chosen is None else list(chosen)
    asked = [*chosen, *([target] if target else []), *([column] if column else [])]
    columns_there(names, asked, "the data set")
    if not len(dataset):
        raise DatasetError("the data set has no rows", code="data.no-rows")
    owners: Any = client
    if dealt:
        client.dataset = dataset
        parts = [client.load_partition(index) for index in range(client.num_partitions)]
        owners = numbered(np.repeat(np.arange(len(parts)), [len(part) for part in parts]))
    else:
        parts = [dataset]
    batches = [part.select_columns(asked).with_format("numpy")[:] for part in parts if len(part)]
    if len(chosen) == 1 and any(np.ndim(batch[chosen[0]][0]) > 0 for batch in batches):
        arrays = {name: _joined([batch[name] for batch in batches], name) for name in asked}
        if column:
            owners = arrays[column]
        if target and (classes := _classes(dataset, target)):
            options = {"classes": classes} | options
        return from_arrays(arrays[chosen[0]], arrays[target] if target else None, client=owners, **options)
    frame = pd.DataFrame({name: np.concatenate([np.asarray(batch[name]) for batch in batches]) for name in asked})
    for name in asked:
        if classes := _classes(dataset, name):
            # The library marks a missing label as -1.
            frame[name] = [classes[index] if index >= 0 else None for index in frame[name]]
            if name != column:
                given = options.get("columns") or {}
                options["columns"] = {**given, name: {"categories": classes} | dict(given.get(name, {}))}
    if dealt:
        frame["client of the partitioner"], column = owners, "client of the partitioner"
    if target is None:
        raise DatasetError("name the target, the column to predict", code="data.no-target")
    return from_dataframe(frame, client=column or client, target=target, features=chosen, **options)


def _joined(parts: list[Any], name: str) -> Any:
    arrays = []
    for part in parts:
        if isinstance(part, list) or part.dtype.kind == "O":  # rows of different lengths come as an array of arrays
            rows = [np.asarray(row) for row in part]
            if len(shapes := sorted({row.shape for row in rows})) > 1:
                told = f"{shapes[0]} and {shapes[-1]}"
                raise DatasetError(f"rows of {name} differ in shape, as {told}; give them one shape", code="data.shape")
            part = np.stack(rows)
        arrays.append(part)
    return np.concatenate(arrays)


def _classes(dataset: Any, name: str) -> list[str]:
    """Return the names of a column of class labels; empty for any other column."""
    names = getattr((dataset.features or {}).get(name), "names", None)
    return list(names) if names else []
