"""DataFrames become datasets, with the types and categories that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import umbel
from tests.helpers.errors import raises
from umbel.data import Column
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


def column(data: umbel.data.importers.ClientData, name: str = "age") -> Column:
    """Return what the schema that was made says of a column."""
    assert data.manifest.layout is not None
    return next(one for one in (*data.manifest.layout.features, data.manifest.layout.target) if one.name == name)


def test_numbers_booleans_and_texts() -> None:
    data = made()
    assert list(data.dataset.names) == ["north", "south"]
    np.testing.assert_array_equal(
        data.dataset.features, [[70, 1, 0, 0, 1], [30, 0, 1, 0, 0], [50, 1, 0, 0, 0], [50, 0, 0, 1, 1]]
    )
    assert data.dataset.targets.tolist() == [12_000, 5_000, 20_000, 3_000]
    assert (data.manifest.model, data.manifest.loss) == ("linear inputs=5 outputs=1", "mse")
    assert data.notes == ("The categories of ward come from the rows; real sites need a public list.",)


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
    assert data.notes == ("The categories of age come from the rows; real sites need a public list.",)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 1, 1, 0], "boolean"),
        (["yes", "no", "No", "YES"], "boolean"),
        (["T", "F", "t", "f"], "boolean"),
        (["yes", "yes", "Yes", "yes"], "boolean"),
        (["1.5", "2", "$3", "1,000"], "number"),
        (["1,5", "7", "0,25", "1.234,5"], "number"),
        (["12 kg", "7 kg", "3.5 kg", "-1 kg"], "number"),
        (["x", "y", "x", "3"], "category"),
        (["N", "F", "n", "f"], "category"),  # both may mean false
        (["65+", "<18", "18-64", "65+"], "category"),
        (pd.Categorical(["x", "y", "x", "y"]), "category"),
        (["20000103", "20000104"] * 2, "date"),
    ],
)
def test_types_are_guessed_from_values(values: Any, kind: str) -> None:
    assert column(made(FRAME.assign(age=values))).type == kind


@pytest.mark.parametrize(
    ("text", "means"),
    [
        *(("1,5", 1.5), ("12%", 12), ("12,5 %", 12.5), ("€1,200", 1200), ("3 €", 3), ("1.234.567", 1_234_567)),
        *(("1 234,50", 1234.5), ("1'000", 1000), ("(20)", -20), ("\u221220", -20), ("20-", -20)),
        *(("03.01.2000", "%d.%m.%Y"), ("1/31/2000", "%m/%d/%Y"), ("31-01-00", "%d-%m-%y")),
        *(("2000/01/31 10:00", "%Y/%m/%d %H:%M"), ("3 Jan 2000", "%d %b %Y"), ("January 3, 2000", "%B %d, %Y")),
        *(("Mar-2018", "%b-%Y"), ("2018-03", "%Y-%m"), ("March 2018", "%B %Y"), ("03/2018", "%m/%Y")),
    ],
)
def test_amounts_and_dates_are_read_where_they_can_be_no_other(text: str, means: float | str) -> None:
    if isinstance(means, str):
        found = column(made(FRAME.assign(age=[text] * 4)))
        assert (found.type, found.format) == ("date", means)
    else:
        assert made(FRAME.assign(age=[text] * 3 + ["7"])).dataset.features[:, 0].tolist() == [means] * 3 + [7]
    said = made(FRAME.assign(age=[text] * 4), columns={"age": {"type": "category"}})
    assert column(said).categories == [text]


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("North", "north", False),
        ("st mary", "St  Mary", True),
        ("007", "7", True),
        ("7.0", "7", True),
        ("K\u00f6ln", "Ko\u0308ln", True),
        ("7", "70", False),
        ("0", "00.5", False),
        ("north-1", "north-2", False),
    ],
)
def test_names_that_may_be_of_one_client_are_noted(first: str, second: str, told: bool) -> None:
    frame = FRAME.assign(hospital=[first, first, second, second])
    assert any("two clients" in note for note in made(frame, validation=0.0).notes) == told


def test_an_accent_may_be_a_character_apart() -> None:
    """As in files from a Mac."""
    apart, joined = "e\u0301mile", "\xe9mile"
    (note,) = made(FRAME.assign(hospital=[apart, joined, "south", "south"]), features=["age"]).notes
    assert repr(joined) in note
    frame = FRAME.rename(columns={"age": joined})
    schema = made(frame, features=[joined]).manifest.layout
    again = umbel.from_dataframe(frame.rename(columns={joined: apart}), schema=schema, validation=["south"])
    assert again.dataset.features.ravel().tolist() == [70, 30, 50, 50]


def test_the_same_schema_encodes_another_table_alike(tmp_path: Path) -> None:
    data = made()
    other = FRAME.assign(ward="B")
    path = data.write(tmp_path / "first")
    again = umbel.from_dataframe(other, schema=path / "manifest.json", validation=["south"])
    assert again.dataset.features[:, 1:4].tolist() == [[0, 1, 0]] * 4
    with raises(DatasetError, "data.bad-value", "ward", "row 1", "'E'"):
        umbel.from_dataframe(FRAME.assign(ward="E"), schema=data.manifest.layout)


def test_a_schema_keeps_its_model_unless_another_is_named() -> None:
    layout = made(model="mlp inputs=5 hidden=2 outputs=1").manifest.layout
    for given, model in {"": "mlp inputs=5 hidden=2 outputs=1", LINEAR: LINEAR}.items():
        assert umbel.from_dataframe(FRAME, schema=layout, model=given, loss="rmse").manifest.model == model
    with raises(DatasetError, "data.unknown-key", "modell", "model?"):
        umbel.from_dataframe(FRAME, schema=layout, modell="linear inputs=5 outputs=1")


def test_declared_ranges_scale_numbers_and_others_stay() -> None:
    ranges = {"age": {"minimum": 30, "maximum": 70}, "cost": {"minimum": 0, "maximum": 20_000}}
    data = made(features=["age"], columns=ranges)
    # By hand: 30 to 70 is 50 give or take 20.
    assert data.manifest.units["features"] == [{"name": "age", "unit": "", "scale": 20.0, "offset": 50.0}]
    assert data.manifest.units["target"]["scale"] == 20_000
    np.testing.assert_array_equal(data.dataset.features[:, 0], [1, -1, 0, 0])
    bare = made(features=["age"]).manifest.units
    assert (bare["target"]["scale"], bare["features"][0]["scale"]) == (1, 1)
    given = made(columns={"age": {"scale": 100}}).manifest.units["features"][0]
    assert given == {"name": "age", "unit": "", "scale": 100, "offset": 0.0}


def test_missing_values_are_refused_unless_told() -> None:
    frame = FRAME.assign(age=[70, np.nan, 50, 50])
    with raises(DatasetError, "data.missing-value", "age", "row 2", "missing='indicate'"):
        made(frame)
    layout = made().manifest.layout
    with raises(DatasetError, "data.missing-value", 'missing = "indicate"'):
        umbel.from_dataframe(frame, schema=layout)
    data = made(frame, missing="drop")
    assert len(data.dataset.targets) == 3
    assert "Rows left out: 1, because age is missing." in data.notes
    assert made(frame, columns={"age": {"fill": "40"}}).dataset.features[1, 0] == 40
    data = made(frame, missing="indicate", features=["age"])
    assert any(note.startswith("age lacks values") for note in data.notes)
    # Another table without gaps has the same columns.
    again = umbel.from_dataframe(FRAME, schema=data.manifest.layout, validation=["south"])
    assert again.dataset.features.tolist() == [[70, 0], [30, 0], [50, 0], [50, 0]]
    with raises(DatasetError, "data.missing-value", "cost", "missing='drop'"):
        made(frame.assign(cost=[1.0, 2.0, np.nan, 4.0]), missing="indicate")


@pytest.mark.parametrize(
    "values",
    [
        pd.to_datetime(["2000-01-03", "2005-12-31 23:59", "2000-01-03", "2000-01-03"], format="ISO8601", utc=True),
        ["2000-01-03", "2005-12-31T23:59+09:00", "2000-01-03 00:00", "2000-01-03"],
    ],
)
def test_a_date_is_its_year_month_weekday_and_days(values: Any) -> None:
    data = made(FRAME.assign(age=values), features=["age"])
    # By hand: 3 January 2000 was a Monday, and 2 days after the first; 31 December 2005 a Saturday, after 2191 days.
    first = [0, -1, -1, 2 / 3652.5]
    np.testing.assert_allclose(data.dataset.features, [first, [0.5, 1, 2 / 3, 2191 / 3652.5], first, first], rtol=1e-6)
    # What the manifest says of the columns leads back to the date.
    units = data.manifest.units["features"]
    back = data.dataset.features[1] * [one["scale"] for one in units] + [one["offset"] for one in units]
    np.testing.assert_allclose(back, [2005, 12, 5, 2191], rtol=1e-6)
    assert [one["name"] for one in units] == ["age: year", "age: month", "age: weekday", "age: days"]
    near = made(FRAME.assign(age=values), features=["age"], columns={"age": {"since": "2005-06-01", "span": 365.25}})
    # By hand: seven months after the first day, in the same year.
    np.testing.assert_allclose(near.dataset.features[1], [0, 1, 2 / 3, 213 / 365.25], rtol=1e-6)
    own = {"parts": ["days"], "since": "2000-01-02", "span": 10}
    assert made(FRAME.assign(age=values), features=["age"], columns={"age": own}).dataset.features[0] == np.float32(0.1)


CODES = pd.concat([FRAME] * 20, ignore_index=True)


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("age", [194, 292, 392, 690], "category"),
        ("age", ["194", "292", "392", "690"], "category"),
        ("age", [1.0, 2.0, 1.0, 2.0], "category"),
        ("age", [0, 1, 2, 3], "number"),  # as amounts are counted
        ("age", [1.5, 2.5, 3.5, 4.5], "number"),
        ("age", [1e20, 3e20, 1e20, 3e20], "number"),  # multiples of 1e20, which no 64-bit integer can hold
        ("age", [-1, -2, -3, -4], "number"),
        ("age", [5, 10, 20, 40], "number"),
        ("age", [-1, 1, -1, 1], "boolean"),
        ("age", ["01234", "05", "05", "7"], "category"),  # a number would lose the zeros
        ("age", ["00", "01", "00", "01"], "category"),
        ("age", ["0.5", "0", "10", "0"], "number"),
        ("age", [*range(5, 45)], "number"),  # too many to be codes
        ("age", [*[7] * 60, *range(20)], "number"),  # of which most come once
        ("cost", [0, 1, 2, 0], "category"),
        ("cost", [0.0, 1.0, 2.0, 0.5], "number"),
    ],
)
def test_whole_numbers_that_look_like_codes_are_categories(name: str, values: list[Any], kind: str) -> None:
    frame = CODES.assign(**{name: (values * 20)[:80]})
    data = made(frame)
    assert column(data, name).type == kind
    told = [note for note in data.notes if f"columns={{{name!r}: {{'type': 'number'}}}}" in note]
    assert len(told) == (kind == "category")
    for entry in ("scale", "offset", "minimum", "maximum") if kind == "category" and name == "age" else ():
        amounts = made(frame, columns={name: {entry: {"minimum": 0}.get(entry, 7000)}})
        assert column(amounts, name).type == "number", "an entry for numbers is given"


def test_what_may_be_numbers_or_else_is_as_it_is_said() -> None:
    said: dict[str, Any] = {"columns": {"age": {"type": "number"}}}
    many = pd.concat([CODES] * 2).assign(age=[f"{code:05}" for code in range(980, 1140)])
    assert made(many, **said).dataset.features[0, 0] == 980
    dates = FRAME.assign(age=["01/02/2025", "03/04/2025"] * 2)
    own = {"age": {"format": "%m/%d/%Y", "parts": ["month"]}}
    assert made(dates, columns=own).dataset.features[:, 0].tolist() == [-1, np.float32(-3.5 / 5.5)] * 2
    for values, scaled in ((1e10 + np.arange(4), {"offset": 1e10}), (1e-50 * np.arange(4), {"scale": 3e-50})):
        frame = FRAME.assign(age=values)
        assert len(set(made(frame, columns={"age": scaled}).dataset.features[:, 0])) == 4


def test_rows_are_dealt_by_label() -> None:
    frame = pd.concat([FRAME] * 10, ignore_index=True).drop(columns="hospital")
    data = umbel.from_dataframe(frame, client=umbel.Dirichlet(3, 0.5), target="ward")
    assert (data.manifest.clients, len(data.dataset.targets)) == (3, 40)
    assert (data.manifest.model, data.manifest.loss) == ("linear inputs=3 outputs=3", "cross-entropy")


MANY = pd.concat([FRAME] * 40, ignore_index=True)
DAYS = ["31.01.2000", "01.02.2000"] * 2


@pytest.mark.parametrize(
    ("frame", "options", "parts"),
    [
        (FRAME, {"target": "price"}, ("data.missing-column", "'price'", "hospital, age, ward, smoker, cost")),
        (FRAME, {"features": ["cost"]}, ("data.no-target", "'cost'")),
        (FRAME, {"features": []}, ("data.missing-column", "'cost'")),
        (FRAME, {"target": None}, ("data.no-target",)),
        (FRAME, {"schema": "own.toml"}, ("data.schema-clash",)),
        (FRAME, {"columns": {"age": {"scael": 2}}}, ("data.unknown-key", "scale?")),
        (FRAME, {"columns": {"room": {"scale": 2}}}, ("data.missing-column", "'room'")),
        (FRAME, {"columns": {"age": {"categories": True, "type": "number"}}}, ("data.conflict", "'age'")),
        (FRAME, {"columns": {"ward": {"pattern": "("}}}, ("data.conflict", "'ward'")),
        (FRAME, {"modell": "linear inputs=5 outputs=1"}, ("data.unknown-key", "model?")),
        (FRAME.set_axis([*range(5)], axis=1), {"client": 0, "target": 4}, ("data.column-name",)),
        (pd.concat([FRAME, FRAME[["age"]]], axis=1), {}, ("data.twice", "'age'")),
        (FRAME.assign(cost=[[0, 1], [1, 0], [1, 1], [0, 0]]), {}, ("data.vectors", "cost")),
        (MANY.assign(ward=[f"w{row}" for row in range(160)]), {}, ("data.categories", "160")),
        (MANY.assign(age=[f"{code:05}" for code in range(980, 1140)]), {}, ("data.categories", "type to number")),
        (FRAME.assign(age=["70", "thirty", "50", "50"]), {}, ("data.bad-value", "age", "row 2", "'thirty'")),
        (FRAME.assign(age=["01/02/2025", "03/04/2025"] * 2), {}, ("data.ambiguous-date", "%d/%m/%Y", "%m/%d/%Y")),
        (FRAME.assign(age=DAYS), {"columns": {"age": {"format": "%m.%d.%Y"}}}, ("data.bad-value", "'%d.%m.%Y'")),
        (FRAME.assign(age=["2000-01-03"] * 4), {"target": "age"}, ("data.conflict", "'age' is a date")),
        *(
            (FRAME.assign(**{name: values}), {}, ("data.precision", name, "scale"))
            for name in ("age", "cost")
            for values in (1e10 + np.arange(4), 1e-50 * np.arange(4))
        ),
        *(
            (frame, {"source": "mine.csv"}, ("data.unprintable", "mine.csv"))
            for frame in (
                FRAME.rename(columns={"ward": "ward\n(letter)"}),
                FRAME.assign(ward="a\nb"),
                FRAME.assign(hospital=["a\xa0b", "a\xa0b", "south", "south"]),
            )
        ),
    ],
)
def test_what_does_not_fit_is_refused(frame: pd.DataFrame, options: dict[str, Any], parts: tuple[str, ...]) -> None:
    with raises(DatasetError, *parts):
        made(frame, **options)


def test_columns_with_a_single_value_are_named() -> None:
    data = made(FRAME.assign(ward="A", year=2024, cost=7.0), columns={"ward": {"categories": ["A"]}})
    assert [note.split()[0] for note in data.notes if "single value" in note] == ["ward", "year", "cost"]
