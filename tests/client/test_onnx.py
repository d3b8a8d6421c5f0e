"""The graph of a file for other programs; what files give is in `tests.cli.test_exports`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from umbel import models
from umbel.client.exports import LACKING, STRANGE, Input, _Graph
from umbel.data import Column, Schema
from umbel.data.table import Reading, seen
from umbel.models.fit import traits_of


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


def test_a_single_output_of_a_loss_of_ones_own_is_no_class_of_several() -> None:
    target = {"name": "grade", "type": "category", "categories": ["bad", "fair", "good"]}
    schema = Schema(target=target, features=[{"name": "age", "type": "number"}])
    model = models.load("linear inputs=1 outputs=1")
    graph = _Graph(model.module, traits_of(model, (1,)), schema)
    assert graph.results == ["prediction"]
    (found,) = graph(torch.tensor([2.0, torch.nan], dtype=torch.float64))
    torch.testing.assert_close(found[:1], model.module(torch.tensor([[2.0]]))[:, 0])
    assert found[1].isnan()
