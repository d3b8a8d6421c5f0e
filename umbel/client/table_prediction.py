"""Predict for the rows of a table: its clients are known in a dataset, or new, and few or no rows have a label."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.client.cohort import Cohort
from umbel.client.learner import Learner
from umbel.client.personal import Predictors
from umbel.client.prediction import (
    DEFAULT,
    Learnt,
    Predicted,
    Prediction,
    predicted,
    present,
    present_outputs,
    probability,
    unknown_client,
)
from umbel.client.trial import try_out
from umbel.data import Dataset, Manifest, Schema, check, offsets_of
from umbel.data.hints import Syntax
from umbel.data.table import encode, named, plain_client, spellings
from umbel.models.fit import traits_of
from umbel.models.model import Model
from umbel.protocol.errors import DatasetError

_SHOWN = 3  # names of clients in a sentence


@dataclass(frozen=True)
class Table:
    """Rows of a table to predict for.

    Attributes
    ----------
    rows : Dataset
        Its clients are those in the table, with their names.
    labelled : ndarray of bool, shape (rows,)
        Which rows have a target; the others hold placeholders.
    places : ndarray of int64, shape (rows,)
        The table's row number of each, from 0.
    notes : list of str
        The rows that were left out, as sentences.
    """

    rows: Dataset
    labelled: NDArray[np.bool_]
    places: NDArray[np.int64]
    notes: list[str]

    @classmethod
    def of(
        cls,
        frame: pd.DataFrame,
        schema: Schema,
        source: Any,
        clients: Sequence[str] = (),
        known: Sequence[str] = (),
    ) -> Table:
        """Encode the rows of a table by a schema.

        If a table names clients, the rows of `clients` are taken, by default all. If it names none, all rows belong to
        the single client given. Names in another case than the `known` ones are of these clients
        (`umbel.data.table.spellings`).

        Raises
        ------
        DatasetError
            If the table does not fit; the text names `source`, the column, the row and the fix.
        """
        if frame.empty:
            raise DatasetError(f"{source} has no rows; give it at least one", code="data.no-rows")
        anonymous = schema.client is None or schema.client.name not in named(frame, schema.columns).columns
        if len(clients) == 1 and anonymous:
            schema = schema.model_copy(update={"client": None, "name": clients[0]})
        if schema.client and not clients and anonymous:
            text = (
                f"{source} has no column {schema.client.name!r}; it has {', '.join(map(str, frame.columns))}; "
                "add it, rename one of these, or name the client of all rows with --client"
            )
            raise DatasetError(text, code="data.missing-column")
        found = encode(frame, schema, source, to_predict=True, syntax=Syntax.PREDICTION)
        spelt, joined = spellings("The table", pd.Series([*map(str, found.clients), *clients], dtype=str), known)
        notes = [*found.notes, *joined]
        owners, clients = np.array([spelt[str(one)] for one in found.clients], object), [spelt[one] for one in clients]
        chosen = np.flatnonzero(np.isin(owners, clients)) if clients else np.arange(len(owners))
        if len(owners) and (strange := [one for one in clients if one not in owners]):
            raise unknown_client(strange[0], f"{source} has the clients ", sorted({*owners}))
        if not len(chosen):
            text = f"{source}: no rows are left ({' '.join(notes)}); repair the table or the schema"
            raise DatasetError(text, code="data.no-rows")
        owner, names = pd.factorize(owners[chosen])
        order = chosen[np.argsort(owner, kind="stable")]
        own = {"name": Path(str(source)).name, "clients": len(names), "split": {"train": len(names), "validation": 0}}
        offsets = offsets_of(np.bincount(owner))
        rows = Dataset(
            Manifest(**schema.said | own), found.features[order], found.targets[order], offsets, names.tolist()
        )
        check(rows, Path(str(source)))
        return cls(rows, found.labelled[order], found.places[order], notes)

    @property
    def owner(self) -> NDArray[np.int64]:
        """The client of each row, (rows,)."""
        return np.repeat(np.arange(self.rows.manifest.clients), self.rows.lengths)

    def support(self, clients: NDArray[np.int64]) -> Dataset:
        """Return the labelled rows of some clients, each with at least one, as a dataset."""
        data, owner = self.rows, self.owner
        chosen = self.labelled & np.isin(owner, clients)
        count = len(clients)
        manifest = data.manifest.model_copy(update={"clients": count, "split": {"train": count, "validation": 0}})
        lengths = np.bincount(owner[chosen], minlength=data.manifest.clients)[clients]
        return Dataset(manifest, data.features[chosen], data.targets[chosen], offsets_of(lengths))


def predict_table(
    learnt: Learnt,
    table: Table,
    known: Dataset | None,
    shares: NDArray[np.float64],
    how: str = DEFAULT,
) -> Predicted:
    """Return the predictions of a table's clients for its rows, in the table's order.

    Their columns are client, row (from 1 below the header, as in errors), hypothesis (none if no label chose one),
    prediction, its `umbel.client.prediction.probability` if there is one, and, if any row has one, target.

    A known client, by its name, has its labelled rows in the dataset; any other has those of the table. They
    personalise the hypotheses. A client without labelled rows gets the hypotheses weighted by `shares` (k,).
    """
    learner, data = try_out(learnt.model, table.rows), table.rows
    places = {name: i for i, name in enumerate(known.names)} if known is not None else {}
    # A client's prediction must not depend on its position in the table.
    numbers = [places.get(name, zlib.crc32(name.encode())) for name in data.names]
    labels = np.bincount(table.owner[table.labelled], minlength=len(numbers))
    is_known = np.array([name in places for name in data.names])
    new, unlabelled = ~is_known & (labels > 0), ~is_known & (labels == 0)
    made: dict[int, Prediction] = {}
    for kind in (is_known, new, unlabelled):
        for some in learnt.chunks(np.flatnonzero(kind).tolist()):
            asked, own = Cohort.gather(data, some, learner.device), [numbers[i] for i in some]
            if kind is unlabelled:
                made |= zip(some, _unlabelled(learnt, learner, own, asked, shares), strict=True)
                continue
            if kind is new:
                support = Cohort.gather(table.support(np.array(some)), range(len(some)), learner.device)
            else:
                assert known is not None, "known clients are in a dataset"
                support = Cohort.gather(known, own, learner.device)
            made |= zip(some, predicted(learnt, learner, own, support, asked, how), strict=True)
    outputs = torch.cat([made[client].outputs for client in range(len(made))])
    chances, said = probability(learnt.model, outputs, data.manifest)
    rows = _rows(learnt.model, table, outputs, [made[client].hypothesis for client in range(len(made))], chances)
    notes, warning = [*table.notes, *_strangers(data.names, places), *said], ""
    if known is not None and is_known.any():
        notes.append(
            f"Clients known in {known.manifest.name}: {is_known.sum():,}. Their rows there choose their predictors."
        )
    if new.any():
        count = labels[new].sum()
        notes.append(f"New clients: {new.sum():,}. Their labelled rows here, {count:,}, choose their predictors.")
    if unlabelled.any():
        names = [data.names[i] for i in np.flatnonzero(unlabelled).tolist()]
        listed = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
        warning = (
            f"Clients without a labelled row: {len(names):,} ({listed}). Their predictions are those of the run's "
            "models on average; past rows with a target, in the same table, would choose and fit a model for them."
        )
    return Predicted(rows, notes, warning)


def _strangers(names: Sequence[str], there: Mapping[str, int]) -> list[str]:
    """Return a note about clients that count as new, although a known one has nearly the same name."""
    plain = {plain_client(name): name for name in there}
    alike = [(name, twin) for name in names if name not in there and (twin := plain.get(plain_client(name)))]
    if not alike:
        return []
    more = f" (and {len(alike) - 1:,} more)" if len(alike) > 1 else ""
    told = f"{alike[0][0]!r} counts as a new client, although {alike[0][1]!r} is known{more}"
    return [f"{told}; if they are one, write the name as in the run's dataset."]


def _unlabelled(
    learnt: Learnt, learner: Learner, clients: Sequence[int], asked: Cohort, shares: NDArray[np.float64]
) -> Iterator[Prediction]:
    """Yield the predictions of clients of which only inputs are known."""
    if learnt.model.local_shapes:
        text = f"model {learnt.model.name!r} needs statistics of each client's labelled rows, and a client has none"
        raise DatasetError(f"{text}; fill in the target of a few rows", code="data.no-labels")
    outputs = traits_of(learnt.model, asked.shape).outputs
    own = Predictors.weighted(len(clients), learnt.hypotheses, outputs[-1], shares)
    for client, rows in zip(clients, own.outputs(learner, asked).cpu().split(asked.lengths.tolist()), strict=True):
        yield Prediction(client, -1, np.nan, rows)


def _rows(
    model: Model, table: Table, outputs: Tensor, hypotheses: Sequence[int], chances: Mapping[str, Any]
) -> pd.DataFrame:
    """Return the rows of `Predicted`, given outputs (rows, \\*output shape), the hypothesis of each client, and the
    column of probabilities."""
    data, owner = table.rows, table.owner
    chosen = pd.Series(np.asarray(hypotheses)[owner], dtype="Int64")
    columns: dict[str, Any] = {
        "client": [data.names[client] for client in owner],
        "row": table.places + 1,
        "hypothesis": chosen.mask(chosen < 0),
        "prediction": present_outputs(model, outputs, data.manifest),
        **chances,
    }
    if table.labelled.any():
        targets = pd.Series(present(data.targets, data.manifest), dtype=object)
        columns["target"] = targets.where(pd.Series(table.labelled), None)
    return pd.DataFrame(columns).sort_values("row", kind="stable", ignore_index=True)
