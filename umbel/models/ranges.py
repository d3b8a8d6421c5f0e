r"""The ranges of columns, learnt by a training task of one round: its model is a histogram of each column.

The grid is public and needs no guess, because its cells double: from 2^j to 2^(j+1), for numbers from 2^-16 to 2^40 of
either sign, with a cell around 0, one beyond each end, and one for missing values. So a range is known up to a factor
of 2, which is enough for a scale.

The loss of a row is minus the sum of the counts of the cells in which its numbers lie, divided by the root of the
number of columns, d. It is linear in the counts. From counts of 0, one step of size 1 on all rows gives each client
minus the mean of its rows' gradients: in each column the share of its rows in each cell, divided by sqrt(d).

**Sensitivity.** Every number lies in one cell: NaN counts as missing, and infinity lies beyond an end. So
the shares p of a column are at least 0 and add up to 1, and |p|^2 <= sum(p) = 1. The update of a client is d such
vectors divided by sqrt(d), and its norm at most sqrt(d / d) = 1, the clip norm. Clipping changes nothing but rounding,
and no proof rests on this: the channel clips and prices like any training, also where a server asks for other steps.

Each of N clients counts 1 in each column, spread over the cells of its rows. A count has noise of deviation
s = sqrt(d) nu, and counts as 0 below `SEEN` s, so that noise alone makes no range. Then a cell may go unseen that as
many clients hold. These are to be `UNSEEN` of all at most, so a question needs SEEN s / UNSEEN clients; with fewer
no client is asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from umbel.data import Dataset, Manifest
from umbel.models.losses import LOSSES
from umbel.models.model import Model
from umbel.protocol.errors import ModelError
from umbel.protocol.ranges import columns_in

EDGES = np.concatenate([-(2.0 ** np.arange(40, -17, -1)), 2.0 ** np.arange(-16, 41)])
"""Public ends of the cells."""
MISSING, CELLS = 0, len(EDGES) + 2
SEEN = 4.0
"""Deviations of the noise from which a count counts: of 115 empty cells, one in 280 columns has a higher one."""
UNSEEN = 0.1
"""The largest share of the clients that may go unseen in a cell."""
_TAIL = 0.01  # of the counts that are seen, beyond each end of a range
_EDGES = torch.from_numpy(EDGES.astype(np.float32))


@dataclass(frozen=True)
class Answer:
    """The part of an answer that is about a column.

    Attributes
    ----------
    clients : float
        How many clients have it, each by the share of its rows that do.
    missing : float
        Share of the rows that lack it, of all clients alike.
    low, middle, high : float
        Ends of the cells of the quantiles 1 % and 99 %, and the middle of the median's; 0 if nothing was seen.
    """

    column: str
    clients: float
    missing: float
    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0


def answers(columns: Sequence[str], counts: NDArray[Any], clients: int, spread: float) -> list[Answer]:
    """Return what noisy counts (columns, cells) of so many clients, with noise of deviation `spread`, tell of columns.

    Counts that are seen are above 0, so quantiles rise. Noise and outliers far from all others do not move them.
    """
    found = []
    for name, noisy in zip(columns, np.asarray(counts, np.float64), strict=True):
        lack = float(noisy[MISSING]) if noisy[MISSING] >= SEEN * spread else 0.0
        missing = min(1.0, lack / clients)
        seen = np.where(noisy[1:] >= max(SEEN * spread, 1e-9), noisy[1:], 0.0)
        ends = 0.0, 0.0, 0.0
        if seen.any():
            upto = np.cumsum(seen) / seen.sum()
            first, middle, last = (_ends(int(np.searchsorted(upto, at))) for at in (_TAIL, 0.5, 1 - _TAIL))
            ends = first[0], (middle[0] + middle[1]) / 2, last[1]
        found.append(Answer(name, clients * (1 - missing), missing, *ends))
    return found


def _ends(cell: int) -> tuple[float, float]:
    """Return the ends of a cell; the outermost are twice as far as their inner ends."""
    ends = np.concatenate([2 * EDGES[:1], EDGES, 2 * EDGES[-1:]])
    return float(ends[cell]), float(ends[cell + 1])


@dataclass(frozen=True)
class _Column:
    """The place of a column in a dataset's rows: of its number, or -1 for the target, and of what marks it missing."""

    place: int
    scale: float
    offset: float
    lacks: int = -1


class Histogram(nn.Module):
    """Counts of cells, of which a row takes those in which its numbers lie."""

    def __init__(self, count: int, columns: Sequence[_Column]) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(count, CELLS))
        self.columns = columns

    @staticmethod
    def misfit(dataset: Dataset) -> str:
        """Return why rows have no columns, to complete a sentence."""
        plain = dataset.features.ndim == 2 and dataset.targets.ndim == 1 and dataset.manifest.feature_scale == 1
        return "" if plain and not dataset.manifest.tokens else "asks about columns, which these data do not have"

    def forward(self, rows: Tensor) -> Tensor:
        """Return the summed counts of each row's numbers, and then the counts of the cells of the target, if asked."""
        total, rest = rows.new_zeros(rows.shape[:-1]), self.counts[:0].flatten()
        for own, column in zip(self.counts, self.columns, strict=True):
            if column.place < 0:
                rest = own
                continue
            cells = _cells(rows[..., column.place], column)
            if column.lacks >= 0:
                cells = torch.where(rows[..., column.lacks] > 0, MISSING, cells)
            total = total + own[cells]
        return torch.cat([total[..., None], rest.expand(*total.shape, len(rest))], dim=-1)


def _cells(stored: Tensor, column: _Column) -> Tensor:
    numbers = (stored * column.scale + column.offset).contiguous()
    return torch.where(numbers.isnan(), MISSING, torch.bucketize(numbers, _EDGES.to(numbers.device)) + 1)


def _per_row(columns: Sequence[_Column], outputs: Tensor, targets: Tensor) -> Tensor:
    total = outputs[..., 0]
    if outputs.shape[-1] > 1:
        cells = _cells(targets.float(), min(columns, key=lambda column: column.place))
        total = total + outputs[..., 1:].gather(-1, cells[..., None]).squeeze(-1)
    return -total / math.sqrt(len(columns))


def model_of(name: str, manifest: Manifest | None = None) -> Model:
    """Return the model of a question; without the manifest of data, one that only has a shape.

    Raises
    ------
    ModelError
        If the data have no such column of numbers.
    """
    asked = columns_in(name)
    if manifest is None:
        return _made(name, len(asked), ())
    target, found, stored = manifest.target, dict[str, _Column](), manifest.units.get("features", [])
    places = {one["name"]: place for place, one in enumerate(stored)}
    for column, place in places.items():
        units = float(stored[place].get("scale", 1)), float(stored[place].get("offset", 0))
        found[column] = _Column(place, *units, places.get(f"{column} is missing", -1))
    if "name" in target and "categories" not in target:
        found[target["name"]] = _Column(-1, float(target.get("scale", 1)), 0.0)
    if unknown := [column for column in asked if column not in found]:
        text = f"dataset {manifest.name!r} has no column of numbers {unknown[0]!r}"
        raise ModelError(f"{text}; it has {', '.join(found)}", code="model.no-column")
    return _made(name, len(asked), tuple(found[column] for column in asked))


@lru_cache(maxsize=16)
def _made(name: str, count: int, columns: tuple[_Column, ...]) -> Model:
    loss = replace(LOSSES["margin"], name="counts", per_sample=partial(_per_row, columns))
    return Model(name, partial(Histogram, count, columns), loss, loss)
