"""DataFrames become datasets, with the types and categories that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import umbel
from tests.helpers.errors import raises
from umbel.data import open_dataset
from umbel.models import load
from umbel.models.fit import misfit
from umbel.protocol.errors import DatasetError

FRAME = pd.DataFrame(
    {
        "hospital": ["north", "north", "south", "south"],
        "age": [70, 30, 50, 50],
        "ward": ["A", "B", "A", "C"],
        "smoker": [True, False, False, True],
        "cost": [12_000.0, 5_000.0, 20_000.0, 3_000.0],
    }
)


LINEAR = "linear inputs=5 outputs=1"


def made(frame: pd.DataFrame = FRAME, **options: Any) -> umbel.data.importers.ClientData:
    return umbel.from_dataframe(frame, **{"client": "hospital", "target": "cost", "validation": ["south"]} | options)


def test_numbers_booleans_and_texts() -> None:
    data = made()
    assert list(data.dataset.names) == ["north", "south"]
    np.testing.assert_array_equal(
        data.dataset.features, [[70, 1, 0, 0, 1], [30, 0, 1, 0, 0], [50, 1, 0, 0, 0], [50, 0, 0, 1, 1]]
    )
    assert data.dataset.targets.tolist() == [12_000, 5_000, 20_000, 3_000]
    assert (data.manifest.model, data.manifest.loss) == ("linear inputs=5 outputs=1", "mse")
    assert data.notes == ("The categories of ward were found in the rows: real sites need a public list.",)


@pytest.mark.parametrize(
    ("target", "model", "loss"),
    [
        ("cost", "linear inputs=5 outputs=1", "mse"),
        ("ward", "linear inputs=3 outputs=3", "cross-entropy"),
        ("smoker", "linear inputs=5 outputs=1", "log"),
    ],
)
def test_the_target_says_model_and_loss_and_they_fit(target: str, model: str, loss: str) -> None:
    data = made(target=target)
    assert (data.manifest.model, data.manifest.loss) == (model, loss)
    assert not misfit(load(model, loss), data.dataset)


def test_what_is_not_to_be_guessed_is_said() -> None:
    columns = {
        "cost": {"scale": 10_000, "unit": "dollars"},
        "age": {"categories": True},
        "ward": {"categories": ["A", "B", "C", "D"]},
    }
    data = made(columns=columns, features=["age", "ward"], model="mlp inputs=7 hidden=4 outputs=1", name="stays")
    assert data.dataset.targets[0] == np.float32(1.2)
    assert data.manifest.units["target"] == {"name": "cost", "unit": "dollars", "scale": 10_000}
    assert [one["name"] for one in data.manifest.units["features"]] == [
        "age = 30", "age = 50", "age = 70", "ward = A", "ward = B", "ward = C", "ward = D",
    ]  # fmt: skip
    assert (data.manifest.model, data.manifest.name) == ("mlp inputs=7 hidden=4 outputs=1", "stays")
    assert data.notes == ("The categories of age were found in the rows: real sites need a public list.",)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 1, 1, 0], "boolean"),
        (["yes", "no", "No", "YES"], "boolean"),
        (["1.5", "2", "$3", "1,000"], "number"),
        ([1, 2, 3, 4], "number"),
        (["x", "y", "x", "3"], "category"),
        (pd.Categorical(["x", "y", "x", "y"]), "category"),
    ],
)
def test_types_are_guessed_from_values(values: Any, kind: str) -> None:
    layout = made(FRAME.assign(age=values)).manifest.layout
    assert layout is not None
    assert layout.features[0].type == kind


def test_a_fault_among_numbers_is_no_category() -> None:
    with raises(DatasetError, "data.bad-value", "age", "row 2", "'thirty'"):
        made(FRAME.assign(age=["70", "thirty", "50", "50"]))


def test_the_same_schema_encodes_another_table_alike(tmp_path: Path) -> None:
    data = made()
    other = FRAME.assign(ward="B")
    path = data.write(tmp_path / "first")
    again = umbel.from_dataframe(other, schema=path / "manifest.json", validation=["south"])
    assert open_dataset(path).manifest.layout == data.manifest.layout
    assert again.dataset.features.shape == data.dataset.features.shape
    assert again.dataset.features[:, 1:4].tolist() == [[0, 1, 0]] * 4
    with raises(DatasetError, "data.bad-value", "ward", "row 1", "'E'"):
        umbel.from_dataframe(FRAME.assign(ward="E"), schema=data.manifest.layout)


def test_a_schema_keeps_its_model_unless_another_is_named() -> None:
    layout = made(model="mlp inputs=5 hidden=2 outputs=1").manifest.layout
    for given, model in {"": "mlp inputs=5 hidden=2 outputs=1", LINEAR: LINEAR}.items():
        assert umbel.from_dataframe(FRAME, schema=layout, model=given, loss="rmse").manifest.model == model
    with raises(DatasetError, "data.unknown-key", "modell", "model?"):
        umbel.from_dataframe(FRAME, schema=layout, modell="linear inputs=5 outputs=1")


def test_statistics_of_training_rows_scale_numbers_and_it_is_said() -> None:
    data = made(standardise=True, features=["age"])
    # Of north's rows alone: ages 70 and 30 have mean 50 and deviation 20, costs a root mean square of 9192.
    assert data.manifest.units["features"] == [{"name": "age", "unit": "", "scale": 20.0, "offset": 50.0}]
    assert data.manifest.units["target"]["scale"] == 9200.0
    np.testing.assert_array_equal(data.dataset.features[:, 0], [1, -1, 0, 0])
    assert "a leak at real sites" in data.notes[-1]
    assert "a leak at real sites" in data.manifest.provenance
    given = made(standardise=True, columns={"age": {"scale": 100}}).manifest.units["features"][0]
    assert given == {"name": "age", "unit": "", "scale": 100, "offset": 0.0}


def test_missing_values_are_refused_unless_told() -> None:
    frame = FRAME.assign(age=[70, np.nan, 50, 50])
    with raises(DatasetError, "data.missing-value", "age", "row 2"):
        made(frame)
    data = made(frame, missing="drop")
    assert len(data.dataset.targets) == 3
    assert "Rows left out: 1, because age is missing." in data.notes
    assert made(frame, columns={"age": {"fill": "40"}}).dataset.features[1, 0] == 40


def test_rows_are_dealt_by_label() -> None:
    frame = pd.concat([FRAME] * 10, ignore_index=True).drop(columns="hospital")
    data = umbel.from_dataframe(frame, client=umbel.Dirichlet(3, 0.5), target="ward")
    assert (data.manifest.clients, len(data.dataset.targets)) == (3, 40)


def test_a_column_of_lists_is_a_sequence() -> None:
    frame = FRAME.assign(text=[[0, 1], [2, 3], [1, 1], [3, 3]])
    data = made(frame, features=["text"], target="smoker", tokens=4)
    assert data.dataset.features.tolist() == [[0, 1], [2, 3], [1, 1], [3, 3]]
    assert data.manifest.tokens == 4
    with raises(DatasetError, "data.shape"):
        made(frame.assign(text=[[0], [2, 3], [1, 1], [3, 3]]), features=["text"], target="smoker", tokens=4)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"target": "price"}, ("data.missing-column", "'price'", "hospital, age, ward, smoker, cost")),
        ({"features": ["cost"]}, ("data.no-target", "'cost'")),
        ({"features": []}, ("data.missing-column", "'cost'")),
        ({"target": None}, ("data.no-target",)),
        ({"schema": "own.toml"}, ("data.schema-clash",)),
        ({"columns": {"age": {"scael": 2}}}, ("data.unknown-key", "scale?")),
        ({"columns": {"room": {"scale": 2}}}, ("data.missing-column", "'room'")),
        ({"columns": {"age": {"categories": True, "type": "number"}}}, ("data.conflict", "'age'")),
        ({"columns": {"ward": {"pattern": "("}}}, ("data.conflict", "'ward'")),
        ({"modell": "linear inputs=5 outputs=1"}, ("data.unknown-key", "model?")),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    with raises(DatasetError, *parts):
        made(**options)


def test_dates_free_text_and_two_columns_of_one_name_are_refused() -> None:
    with raises(DatasetError, "data.twice", "'age'"):
        made(pd.concat([FRAME, FRAME[["age"]]], axis=1))
    with raises(DatasetError, "data.dates"):
        made(FRAME.assign(age=pd.date_range("2020-01-01", periods=4)))
    many = pd.concat([FRAME] * 40, ignore_index=True)
    with raises(DatasetError, "data.categories", "160"):
        made(many.assign(ward=[f"w{row}" for row in range(160)]))
