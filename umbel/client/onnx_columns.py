"""The columns of a schema in an ONNX file: their inputs, and their encoding in the graph.

=======================  ================================  =======
type                     input (rows,)                     missing
=======================  ================================  =======
number, integer          float64                           NaN
boolean                  float64 of 0 and 1                NaN
category                 text, one of the categories       empty
=======================  ================================  =======

The pattern of a category concerns texts in a table, and is not used. A file takes no dates.
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
from umbel.protocol.errors import DatasetError

LACKING, STRANGE = -2, -1
"""Internal places of a category: for a missing text, and for one that the schema does not accept."""


@dataclass(frozen=True)
class Input:
    """A feature of a schema as an input."""

    column: Column

    def __post_init__(self) -> None:
        if self.column.type == "date":
            text = f"column {self.name!r} holds dates, which no ONNX file takes; import it as numbers, such as its year"
            raise DatasetError(text, code="data.date-in-onnx")

    @property
    def name(self) -> str:
        return self.column.name

    @property
    def text(self) -> bool:
        """Whether it takes text, which the graph knows as positions in the list of categories."""
        return self.column.type == "category"

    @property
    def takes(self) -> str:
        """The accepted values, for the file's metadata."""
        return "text, empty if missing" if self.text else "float64, NaN if missing"

    @property
    def inside(self) -> torch.dtype:
        """The type of its numbers in the graph."""
        return torch.int64 if self.text else torch.float64

    @cached_property
    def instead(self) -> NDArray[np.float64] | None:
        """A model's view of a missing value (numbers,); None if the row gets no prediction."""
        if self.column.fill == "" and self.column.missing != "indicate":
            return None
        frame = pd.DataFrame({self.name: pd.Series([None], dtype=object)})
        found: NDArray[np.float64] = seen(frame, self.column, "a missing value")[0]
        return found

    def encoded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a model's view (rows, numbers), as in `umbel.data.table.seen`, and which rows get a prediction."""
        column, numbers = self.column, values[:, None]
        lacks, sound = (values == LACKING, values >= 0) if self.text else (values.isnan(), self._sound(values))
        if self.text and column.encode == "one-hot":
            numbers = numbers == torch.arange(len(column.classes))
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
        low, high = self._limits
        values: Any
        if self.text:
            values = [column.categories[i % len(column.categories)] for i in places]
        elif column.type == "boolean":
            values = [i % 2 == 0 for i in places]
        else:
            values = np.clip(column.offset + column.scale * np.linspace(-1, 1, rows + 1)[1:], low, high)
            if column.type == "integer":
                values = np.clip(np.ceil(values), np.ceil(low), np.floor(high))
        found = pd.Series(values, dtype=object)
        return found.where(found.index != 2, None) if self.instead is not None else found

    def given(self, values: pd.Series) -> NDArray[Any]:
        """Return the values of `example` as the file takes them."""
        return values.fillna("").to_numpy(object) if self.text else values.to_numpy(np.float64, na_value=np.nan)

    @property
    def _limits(self) -> tuple[float, float]:
        low, high = self.column.minimum, self.column.maximum
        return -np.inf if low is None else low, np.inf if high is None else high

    def _sound(self, values: Tensor) -> Tensor:
        """Return which numbers the schema accepts."""
        if self.column.type == "boolean":
            return (values == 0) | (values == 1)
        low, high = self._limits
        sound = (values >= low) & (values <= high) & (values.abs() < torch.inf)
        return sound & (values == values.round()) if self.column.type == "integer" else sound
