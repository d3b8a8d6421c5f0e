"""The columns of a schema in an ONNX file: their inputs, and their encoding in the graph.

========  ==========================================  =======
type      input (rows,)                               missing
========  ==========================================  =======
number    float64                                     NaN
integer   float64                                     NaN
boolean   bool; float64, where one may be missing     NaN
category  text, one of the categories                 empty
date      int64, days since 1970-01-01                the lowest
========  ==========================================  =======

So NumPy's ``datetime64[D]``, viewed as int64, is the input for a date. The pattern of a category and the format of a
date concern texts in a table, and are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.data import Column
from umbel.data.table import seen

LACKING, STRANGE = -2, -1
"""Internal places of a category: for a missing text, and for one that the schema does not accept."""
_NO_DATE = np.iinfo(np.int64).min  # NumPy's NaT
_DAY_0 = 719_468  # 1970-01-01, counted from 0000-03-01


@dataclass(frozen=True)
class Input:
    """A feature of a schema as an input."""

    column: Column

    @property
    def name(self) -> str:
        return self.column.name

    @cached_property
    def instead(self) -> NDArray[np.float64] | None:
        """A model's view of a missing value (numbers,); None if the row gets no prediction."""
        if self.column.fill == "" and self.column.missing != "indicate":
            return None
        frame = pd.DataFrame({self.name: pd.Series([None], dtype=object)})
        found: NDArray[np.float64] = seen(frame, self.column, "a missing value")[0]
        return found

    @property
    def takes(self) -> str:
        """The accepted values, for the file's metadata."""
        match self.column.type:
            case "category":
                return "text, empty if missing"
            case "date":
                return "int64, days since 1970-01-01, the lowest if missing"
        return "bool" if self.inside is torch.bool else "float64, NaN if missing"

    @property
    def inside(self) -> torch.dtype:
        """The type of its numbers in the graph; for a category, positions in the list."""
        if self.column.type in ("category", "date"):
            return torch.int64
        return torch.bool if self.column.type == "boolean" and self.instead is None else torch.float64

    def encoded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a model's view (rows, numbers), as in `umbel.data.table.seen`, and which rows get a prediction."""
        column = self.column
        lacks = _lacks(column, values)
        numbers, sound = _NUMBERS[column.type](column, values)
        stored = column.stored[:-1] if column.missing == "indicate" else column.stored
        offsets, scales = (
            torch.tensor([one[key] for one in stored], dtype=torch.float64) for key in ("offset", "scale")
        )
        numbers = (numbers.double() - offsets) / scales
        if column.missing == "indicate":
            numbers = torch.cat([numbers, torch.zeros_like(numbers[:, :1])], 1)
        if self.instead is None:
            return numbers, sound & ~lacks
        return torch.where(lacks[:, None], torch.from_numpy(self.instead), numbers), sound | lacks

    def example(self, rows: int) -> pd.Series:
        """Return values as in a table, (rows,); the third is missing, if that is allowed."""
        column, places = self.column, range(rows)
        low = -np.inf if column.minimum is None else column.minimum
        high = np.inf if column.maximum is None else column.maximum
        values: Any
        if column.type == "category":
            values = [column.categories[i % len(column.categories)] for i in places]
        elif column.type == "boolean":
            values = [i % 2 == 0 for i in places]
        elif column.type == "date":
            values = [pd.Timestamp(column.since) + pd.Timedelta(days=int(i * column.span / 5 + 59)) for i in places]
        else:
            values = np.clip(column.offset + column.scale * np.linspace(-1, 1, rows + 1)[1:], low, high)
            if column.type == "integer":
                values = np.clip(np.ceil(values), np.ceil(low), np.floor(high))
        found = pd.Series(values, dtype=object)
        return found.where(found.index != 2, None) if self.instead is not None else found

    def given(self, values: pd.Series) -> NDArray[Any]:
        """Return the values of `example` as the file takes them."""
        match self.column.type:
            case "category":
                return values.fillna("").to_numpy(object)
            case "date":
                return pd.to_datetime(values).to_numpy("datetime64[D]").astype(np.int64)
        return values.to_numpy(np.bool_ if self.inside is torch.bool else np.float64, na_value=np.nan)


def _lacks(column: Column, values: Tensor) -> Tensor:
    if column.type == "category":
        return values == LACKING
    if column.type == "date":
        return values == _NO_DATE
    return values.isnan() if values.is_floating_point() else torch.zeros_like(values)


def _number(column: Column, values: Tensor) -> tuple[Tensor, Tensor]:
    low = -torch.inf if column.minimum is None else column.minimum
    high = torch.inf if column.maximum is None else column.maximum
    sound = (values >= low) & (values <= high) & (values.abs() < torch.inf)
    if column.type == "integer":
        sound = sound & (values == values.round())
    return values[:, None], sound


def _boolean(_: Column, values: Tensor) -> tuple[Tensor, Tensor]:
    if not values.is_floating_point():
        return values[:, None], torch.ones_like(values)
    return values[:, None], (values == 0) | (values == 1)


def _category(column: Column, places: Tensor) -> tuple[Tensor, Tensor]:
    one_hot = column.encode == "one-hot"
    numbers = places[:, None] == torch.arange(len(column.classes)) if one_hot else places[:, None]
    return numbers, places >= 0


def _date(column: Column, days: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of a date.

    Years are counted from March, so that a leap day is the last of its year; an era is 400 years.
    """
    count = days.double() + _DAY_0
    era = (count / 146_097).floor()
    of_era = count - era * 146_097
    leaps = (of_era / 1_460).floor() - (of_era / 36_524).floor() + (of_era / 146_096).floor()
    year = ((of_era - leaps) / 365).floor()
    of_year = of_era - (365 * year + (year / 4).floor() - (year / 100).floor())
    month = ((5 * of_year + 2) / 153).floor()  # 0 for March
    since = (pd.Timestamp(column.since) - pd.Timestamp(0)).days
    thursday = days.double() + 3  # the weekday of 1970-01-01, where Monday is 0
    parts = {
        "year": year + era * 400 + (month >= 10),
        "month": torch.where(month < 10, month + 3, month - 9),
        "weekday": thursday - 7 * (thursday / 7).floor(),
        "days": days.double() - since,
    }
    return torch.stack([parts[part] for part in column.parts], 1), torch.ones_like(days, dtype=torch.bool)


_NUMBERS = {"number": _number, "integer": _number, "boolean": _boolean, "category": _category, "date": _date}
