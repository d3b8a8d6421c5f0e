"""A column is in a graph what it is in an encoded table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from umbel.client.exports import LACKING, STRANGE, Input
from umbel.data import Column
from umbel.data.table import Reading, seen


@pytest.mark.parametrize(
    ("entries", "values", "sound"),
    [
        ({"type": "number", "minimum": 0, "maximum": 9}, [0.0, 9.0, 9.1, -1.0, np.inf, np.nan], [1, 1, 0, 0, 0, 0]),
        ({"type": "number", "maximum": 9, "outside": "clip"}, [9.1, -1.0, np.inf, np.nan], [1, 1, 0, 0]),
        ({"type": "integer"}, [1.0, 1.5, np.nan, -3.0], [1, 0, 0, 1]),
        ({"type": "number", "fill": 2}, [np.nan, 1.0], [1, 1]),
        ({"type": "boolean", "missing": "indicate"}, [1.0, 0.0, 0.5, np.nan], [1, 1, 0, 1]),
        ({"type": "category", "categories": ["a", "b"]}, [0, 1, STRANGE, LACKING], [1, 1, 0, 0]),
        ({"type": "category", "categories": ["a", "b"], "fill": "b"}, [0, STRANGE, LACKING], [1, 0, 1]),
    ],
)
def test_a_row_gets_a_prediction_where_the_schema_takes_its_value(
    entries: dict[str, Any], values: list[Any], sound: list[int]
) -> None:
    made = Input(Column(name="x", **entries))
    assert made.encoded(torch.tensor(values, dtype=made.inside))[1].int().tolist() == sound


def test_an_example_holds_what_the_table_takes_and_a_missing_value_where_it_may() -> None:
    column = Column(name="x", type="integer", minimum=3, maximum=4, missing="indicate")
    values = Input(column).example(3)
    assert values.isna().tolist() == [False, False, True]
    np.testing.assert_array_equal(seen(pd.DataFrame({"x": values}), column, Reading("x"))[2], [0, 1])
