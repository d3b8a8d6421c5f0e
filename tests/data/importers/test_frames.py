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
    assert data.notes == ("The categories of ward come from the rows; real sites need a public list.",)


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
    assert data.notes == ("The categories of age come from the rows; real sites need a public list.",)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 1, 1, 0], "boolean"),
        (["yes", "no", "No", "YES"], "boolean"),
        (["1.5", "2", "$3", "1,000"], "number"),
        ([1, 2, 3, 4], "number"),
        (["x", "y", "x", "3"], "category"),
        (["N", "F", "n", "f"], "category"),  # both may mean false
        (["T", "F", "t", "f"], "boolean"),
        (["yes", "yes", "Yes", "yes"], "boolean"),
        (["65+", "<18", "18-64", "65+"], "category"),
        (["03.01.2000", "04.01.2000"] * 2, "date"),
        (["1,5", "7", "0,25", "1.234,5"], "number"),
        (["12 kg", "7 kg", "3.5 kg", "-1 kg"], "number"),
        (["20000103", "20000104"] * 2, "date"),
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


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("1,5", 1.5), ("12%", 12), ("12,5 %", 12.5), ("€1,200", 1200), ("3 €", 3), ("1.234.567", 1_234_567)),
        *(("1 234,50", 1234.5), ("1'000", 1000), ("(20)", -20), ("\u221220", -20), ("20-", -20)),
    ],
)
def test_amounts_with_other_signs_or_units_are_read_where_they_can_be_no_other(text: str, number: float) -> None:
    mixed = FRAME.assign(age=[text] * 3 + ["7"])
    assert made(mixed).dataset.features[:, 0].tolist() == [number] * 3 + [7]
    layout = made(FRAME.assign(age=[text] * 4), columns={"age": {"type": "category"}}).manifest.layout
    assert layout is not None
    assert layout.features[0].categories == [text]


@pytest.mark.parametrize(
    ("text", "style"),
    [
        *(("03.01.2000", "%d.%m.%Y"), ("1/31/2000", "%m/%d/%Y"), ("31-01-00", "%d-%m-%y")),
        *(("2000/01/31 10:00", "%Y/%m/%d %H:%M"), ("3 Jan 2000", "%d %b %Y"), ("January 3, 2000", "%B %d, %Y")),
    ],
)
def test_dates_are_read_in_the_order_that_fits_all(text: str, style: str) -> None:
    layout = made(FRAME.assign(age=[text] * 4)).manifest.layout
    assert layout is not None
    assert (layout.features[0].type, layout.features[0].format) == ("date", style)
    layout = made(FRAME.assign(age=[text] * 4), columns={"age": {"type": "category"}}).manifest.layout
    assert layout is not None
    assert layout.features[0].categories == [text]


def test_a_day_that_may_be_a_month_is_asked_for_once() -> None:
    frame = FRAME.assign(age=["01/02/2025", "03/04/2025", "01/02/2025", "03/04/2025"])
    with raises(DatasetError, "data.ambiguous-date", "'01/02/2025'", "%d/%m/%Y", "%m/%d/%Y"):
        made(frame)
    own = {"format": "%m/%d/%Y", "parts": ["month"]}
    assert made(frame, columns={"age": own}).dataset.features[:, 0].tolist() == [-1, np.float32(-3.5 / 5.5)] * 2


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


@pytest.mark.parametrize("names", [[0, 1, 2, 3, 4], pd.MultiIndex.from_product([["a"], range(5)])])
def test_a_column_needs_a_name_of_text(names: Any) -> None:
    frame = FRAME.set_axis(names, axis=1)
    with raises(DatasetError, "data.column-name", "rename it"):
        made(frame, client=frame.columns[0], target=frame.columns[4])


def test_a_listed_category_that_may_mean_missing_is_not_indicated() -> None:
    data = made(FRAME.assign(ward=["NA", "B", "NA", ""]), columns={"ward": {"categories": ["NA", "B"]}}, missing="drop")
    assert data.dataset.features[:, 1:3].tolist() == [[1, 0], [0, 1], [1, 0]]
    data = made(FRAME.assign(ward=["NA", "B"] * 2), columns={"ward": {"categories": ["NA", "B"]}}, missing="indicate")
    assert data.dataset.features.shape[1] == 4


def test_an_accent_may_be_a_character_apart() -> None:
    """As in files from a Mac."""
    apart, joined = "e\u0301mile", "\xe9mile"
    (note,) = made(FRAME.assign(hospital=[apart, joined, "south", "south"]), features=["age"]).notes
    assert repr(joined) in note
    frame = FRAME.rename(columns={"age": joined})
    schema = made(frame, features=[joined]).manifest.layout
    again = umbel.from_dataframe(frame.rename(columns={joined: apart}), schema=schema, validation=["south"])
    assert again.dataset.features.ravel().tolist() == [70, 30, 50, 50]


@pytest.mark.parametrize(
    "frame",
    [
        FRAME.rename(columns={"ward": "ward\n(letter)"}),
        FRAME.assign(ward="a\nb"),
        FRAME.assign(hospital=["a\xa0b", "a\xa0b", "south", "south"]),
    ],
)
def test_texts_that_are_not_printable_are_named_with_their_table(frame: pd.DataFrame) -> None:
    with raises(DatasetError, "data.unprintable", "mine.csv holds"):
        made(frame, source="mine.csv")


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


def test_a_feature_that_lacks_values_may_say_so() -> None:
    frame = FRAME.assign(age=[70, np.nan, 50, 50], ward=["A", "B", None, "C"])
    data = made(frame, missing="indicate", columns={"age": {"offset": 50, "scale": 20}}, features=["age", "ward"])
    # By hand: (age - 50) / 20 and whether it is missing; ward A, B, C and whether it is missing.
    wanted = [[1, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0]]
    assert data.dataset.features.tolist() == wanted
    assert data.manifest.model == "linear inputs=6 outputs=1"
    names = [one["name"] for one in data.manifest.units["features"]]
    assert names == ["age", "age is missing", "ward = A", "ward = B", "ward = C", "ward is missing"]
    assert any(note.startswith("age, ward lack values") for note in data.notes)
    # Another table without gaps has the same columns.
    again = umbel.from_dataframe(FRAME, schema=data.manifest.layout, validation=["south"])
    assert again.dataset.features[:, [1, 5]].tolist() == [[0, 0]] * 4
    filled = made(frame, missing="indicate", columns={"age": {"fill": 30}}, features=["age"])
    assert filled.dataset.features.tolist() == [[70, 0], [30, 1], [50, 0], [50, 0]]
    with raises(DatasetError, "data.missing-value", "cost", "missing='drop'"):
        made(frame.assign(cost=[1.0, 2.0, np.nan, 4.0]), missing="indicate")


@pytest.mark.parametrize(
    "values",
    [
        pd.to_datetime(["2000-01-03", "2005-12-31 23:59", "2000-01-03", "2000-01-03"], format="ISO8601"),
        pd.to_datetime(["2000-01-03", "2005-12-31 23:59", "2000-01-03", "2000-01-03"], format="ISO8601", utc=True),
        ["2000-01-03", "2005-12-31T23:59+09:00", "2000-01-03 00:00", "2000-01-03"],
    ],
)
def test_a_date_is_its_year_month_weekday_and_days(values: Any) -> None:
    data = made(FRAME.assign(age=values), features=["age"])
    # By hand: 3 January 2000 was a Monday, and 2 days after the first; 31 December 2005 a Saturday, after 2191 days.
    first = [0, -1, -1, 2 / 3652.5]
    np.testing.assert_allclose(data.dataset.features, [first, [0.5, 1, 2 / 3, 2191 / 3652.5], first, first], rtol=1e-6)
    assert [one["name"] for one in data.manifest.units["features"]] == [
        "age: year", "age: month", "age: weekday", "age: days",
    ]  # fmt: skip
    # What the manifest says of the columns leads back to the date.
    units = data.manifest.units["features"]
    back = data.dataset.features[1] * [one["scale"] for one in units] + [one["offset"] for one in units]
    np.testing.assert_allclose(back, [2005, 12, 5, 2191], rtol=1e-6)
    assert [one["unit"] for one in units] == ["year", "1 to 12", "0 for Monday to 6", "days since 2000-01-01"]
    near = made(FRAME.assign(age=values), features=["age"], columns={"age": {"since": "2005-06-01", "span": 365.25}})
    # By hand: seven months after the first day, in the same year.
    np.testing.assert_allclose(near.dataset.features[1], [0, 1, 2 / 3, 213 / 365.25], rtol=1e-6)
    own = {"parts": ["days"], "since": "2000-01-02", "span": 10}
    assert made(FRAME.assign(age=values), features=["age"], columns={"age": own}).dataset.features[0] == np.float32(0.1)


def test_a_format_that_reads_no_date_is_not_proposed_again() -> None:
    frame = FRAME.assign(age=["31.01.2000", "01.02.2000"] * 2)
    with raises(DatasetError, "data.bad-value", "age", "'31.01.2000'", "columns={'age': {'format': '%d.%m.%Y'}}"):
        made(frame, features=["age"], columns={"age": {"format": "%m.%d.%Y"}})
    with raises(DatasetError, "data.conflict", "'age' is a date"):
        made(FRAME.assign(age=["2000-01-03"] * 4), target="age")


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
        ("age", ["on", "Off", "ON", "off"], "boolean"),
        ("age", ["01234", "05", "05", "7"], "category"),  # a number would lose the zeros
        ("age", ["00", "01", "00", "01"], "category"),
        ("age", ["0.5", "0", "10", "0"], "number"),
        ("cost", [0, 1, 2, 0], "category"),
        ("cost", [0.0, 1.0, 2.0, 0.5], "number"),
    ],
)
def test_whole_numbers_that_look_like_codes_are_categories(name: str, values: list[Any], kind: str) -> None:
    data = made(CODES.assign(**{name: values * 20}))
    layout = data.manifest.layout
    assert layout is not None
    found = {column.name: column for column in (*layout.features, layout.target)}
    assert found[name].type == kind
    told = [note for note in data.notes if f"columns={{{name!r}: {{'type': 'number'}}}}" in note]
    assert len(told) == (kind == "category")
    if kind == "category":
        assert f"{name} holds {len(set(values))} different whole numbers" in told[0]
        said = made(CODES.assign(**{name: values * 20}), columns={name: {"type": "number"}})
        assert said.manifest.layout is not None
        assert not any("whole numbers" in note for note in said.notes)


@pytest.mark.parametrize("entry", [{"scale": 10}, {"offset": 100}, {"minimum": 0}, {"maximum": 700}])
def test_a_column_of_which_an_entry_for_numbers_is_given_holds_amounts(entry: dict[str, float]) -> None:
    layout = made(CODES.assign(age=[194, 292, 392, 690] * 20), columns={"age": entry}).manifest.layout
    assert layout is not None
    assert layout.features[0].type == "number"


def test_many_values_or_few_rows_are_no_codes() -> None:
    for ages in (np.arange(80) % 40 + 5, np.r_[np.full(60, 7), np.arange(20)]):
        layout = made(CODES.assign(age=ages)).manifest.layout
        assert layout is not None
        assert layout.features[0].type == "number"


def test_many_codes_with_leading_zeros_are_amounts_only_if_that_is_said() -> None:
    many = pd.concat([CODES] * 2).assign(age=[f"{code:05}" for code in range(980, 1140)])
    with raises(DatasetError, "data.categories", "age", "type to number"):
        made(many)
    assert made(many, columns={"age": {"type": "number"}}).dataset.features[0, 0] == 980


def test_rows_are_dealt_by_label() -> None:
    frame = pd.concat([FRAME] * 10, ignore_index=True).drop(columns="hospital")
    data = umbel.from_dataframe(frame, client=umbel.Dirichlet(3, 0.5), target="ward")
    assert (data.manifest.clients, len(data.dataset.targets)) == (3, 40)


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


def test_free_text_lists_and_two_columns_of_one_name_are_refused() -> None:
    with raises(DatasetError, "data.twice", "'age'"):
        made(pd.concat([FRAME, FRAME[["age"]]], axis=1))
    with raises(DatasetError, "data.vectors", "cost holds lists"):
        made(FRAME.assign(cost=[[0, 1], [1, 0], [1, 1], [0, 0]]))
    many = pd.concat([FRAME] * 40, ignore_index=True)
    with raises(DatasetError, "data.categories", "160"):
        made(many.assign(ward=[f"w{row}" for row in range(160)]))


def test_columns_with_a_single_value_are_named() -> None:
    data = made(FRAME.assign(ward="A", year=2024, cost=7.0), columns={"ward": {"categories": ["A"]}})
    assert [note.split()[0] for note in data.notes if "single value" in note] == ["ward", "year", "cost"]


@pytest.mark.parametrize("name", ["age", "cost"])
@pytest.mark.parametrize("values", [1e10 + np.arange(4), 1e-50 * np.arange(4)])
def test_numbers_whose_differences_32_bits_lose_are_refused(name: str, values: Any) -> None:
    with raises(DatasetError, "data.precision", name, "scale"):
        made(FRAME.assign(**{name: values}))
    far = {"offset": 1e10} if name == "age" and values[0] else {}
    if far or not values[0]:
        columns = {name: {"scale": float(values[3] - values[0]), **far}}
        assert len(set(made(FRAME.assign(**{name: values}), columns=columns).dataset.features[:, 0])) > 1
    made(FRAME.assign(**{name: [1e10, 1, 2, 3]}))
