"""A table is checked against its schema: the error names the column, the row and the fix."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.data.test_schema import ENTRIES, SCHEMA, TOML
from tests.helpers.datasets import Numbers
from tests.helpers.errors import raises
from umbel.data import Schema
from umbel.data.table import encode, read, read_table
from umbel.protocol.errors import DatasetError

CSV = """\
hospital,age,ward,smoker,cost
north,70,A,yes,"$12,000.00"
south,30,Z,no,5000
north,50,B,no,20000
"""


def table(text: str, tmp_path: Path, name: str = "stays.csv") -> pd.DataFrame:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read_table(tmp_path / name)


def schema(**changes: Any) -> Schema:
    return Schema.parse(ENTRIES | changes)


def with_feature(**entries: Any) -> Schema:
    return schema(features=[{"name": "age", "type": "number"} | entries])


def test_rows_become_numbers(tmp_path: Path) -> None:
    rows = encode(table(CSV, tmp_path), SCHEMA, "stays")
    # By hand: (age - 50) / 20; ward A, B and any other; smoker. Dollars / 10,000.
    np.testing.assert_array_equal(rows.features, [[1, 1, 0, 0, 1], [-1, 0, 0, 1, 0], [0, 0, 1, 0, 0]])
    np.testing.assert_array_equal(rows.targets, np.array([1.2, 0.5, 2], np.float32))
    assert (rows.features.dtype, rows.targets.dtype) == (np.float32, np.float32)
    assert rows.clients == ["north", "south", "north"]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_a_byte_order_mark_and_columns_without_a_name_play_no_part(tmp_path: Path, separator: str) -> None:
    text = "\ufeffHospital_,Age,ward,SMOKER,cost,,\nnorth,70,A,1,12000,,,,,\nnorth,70,A,1,12000,,\n"
    rows = encode(table(text.replace(",", separator), tmp_path), SCHEMA, "stays")
    np.testing.assert_array_equal(rows.features, [[1, 1, 0, 0, 1]] * 2)


def test_numbers_of_rows_are_no_column(tmp_path: Path) -> None:
    """R and pandas write them first, below an empty name."""
    numbered = "\n".join(f"{n or ''},{line}" for n, line in enumerate(CSV.splitlines()))
    pd.testing.assert_frame_equal(table(numbered, tmp_path), table(CSV, tmp_path))


@pytest.mark.parametrize(
    ("encoding", "name"),
    [("utf-8", "UTF-8"), ("utf-8-sig", "UTF-8"), ("utf-16", "UTF-16"), ("cp1252", "Windows-1252")],
)
def test_a_file_of_a_spreadsheet_is_read_in_its_encoding(tmp_path: Path, encoding: str, name: str) -> None:
    (tmp_path / "stays.csv").write_bytes("größe\téé\n1\t€ 2\n".encode(encoding))
    frame = read_table(tmp_path / "stays.csv")
    assert (frame.to_dict("list"), frame.attrs["encoding"]) == ({"größe": ["1"], "éé": ["€ 2"]}, name)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("stays.csv", b"age,cost\n\x81,1\n", "data.unreadable"),  # bytes that are no letters
        ("stays.parquet", b"no", "data.unreadable"),
        ("stays.json", b'[{"age": 30}]', "data.unreadable"),
        ("nowhere.csv", None, "data.no-file"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, name: str, content: bytes | None, code: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with raises(DatasetError, code, name):
        read_table(tmp_path / name)


NUMBER: dict[str, Any] = {"features": [{"name": "age", "type": "number"}]}
WHOLE: dict[str, Any] = {"features": [{"name": "age", "type": "integer"}]}
TINY: dict[str, Any] = {"features": [{"name": "age", "type": "number", "scale": 1e-20}]}
TARGET: dict[str, Any] = {"target": {"name": "age", "type": "number"}, "features": [{"name": "cost", "type": "number"}]}
ROW_2 = ("data.bad-value", "age", "row 2")


def with_age(text: str) -> str:
    return CSV.replace("30", f'"{text}"')


@pytest.mark.parametrize(
    ("text", "changes", "parts"),
    [
        (CSV.replace("70,A", "70,A,7"), {}, ("data.missing-column", "row 1", "column 6")),
        (CSV.replace("70,A", "70,A,,,,7"), {}, ("data.missing-column", "row 1", "column 7")),
        (f",{CSV}".replace("\n", "\n7,"), {}, ("data.missing-column", "column 1,")),
        (CSV.replace("70,A", "70,A" + 200 * ","), {}, ("data.unreadable", "fields")),
        (CSV.replace("ward", "age"), {}, ("data.twice", "'age'")),
        ("age, age\n1,2\n", {}, ("data.twice", "'age'")),
        ("age,cost\n1,2\n1,2,3\n", {}, ("data.unreadable", "line 3", "comma")),
        ("age,age,\n1,2,\n1,2,3\n", {}, ("data.twice", "'age'", "row 2", "column 3")),
        (CSV.replace("age", "Age").replace("ward", "AGE"), {}, ("data.twice", "'Age'", "'AGE'")),
        ("", {}, ("data.unreadable",)),
        (CSV.replace("ward", "room"), {}, ("data.missing-column", "stays", "['ward']", "'age', 'room', 'smoker'")),
        (with_age("thirty"), {}, (*ROW_2, "'thirty'")),
        (with_age("130"), {}, (*ROW_2, "'130'", "0 to 120")),
        (with_age(""), {}, ("data.missing-value", "age", "row 2", 'missing = "drop"')),
        (with_age(" NA "), {}, ("data.missing-value", "age", "row 2")),
        (CSV.replace("no", "maybe"), {}, ("data.bad-value", "smoker", "row 2", "'maybe'", "1 more row)")),
        (CSV.replace("south", ""), {}, ("data.missing-value", "hospital", "row 2")),
        (CSV.replace("5000", "1e999"), {}, ("data.bad-value", "cost", "row 2", "'1e999'")),
        (with_age("30.5"), WHOLE, (*ROW_2, "'30.5'")),
        *((with_age("1e39"), own, (*ROW_2, "'1e39'", "32 bits")) for own in (NUMBER, TARGET)),
        (with_age("-1e300"), TINY, (*ROW_2, "'-1e300'", "32 bits")),
        # What may be another number is none.
        *((with_age(text), NUMBER, ROW_2) for text in (
            "1,5", "12,34", "1,2345", "0,250", "1.2.3", "12 %", "0x10", "$", "$5$", "--1", "1_000",
        )),
    ],
)  # fmt: skip
def test_the_first_bad_row_is_named(tmp_path: Path, text: str, changes: Any, parts: tuple[str, ...]) -> None:
    with raises(DatasetError, *parts):
        encode(table(text, tmp_path), schema(**changes), "stays")


def test_names_of_columns_are_as_they_are_where_that_is_one_column(tmp_path: Path) -> None:
    frame = table("height, cm;weight, kg;town\n1;2;a\n", tmp_path)
    assert list(frame.columns) == ["height, cm", "weight, kg", "town"]
    frame = table(CSV, tmp_path).assign(AGE="7", age="50")
    assert encode(frame, SCHEMA, "stays").features[0, 0] == 0, "the exact name wins"
    # An empty line is a missing value of a single column.
    assert len(table("age\n30\n\n40\n", tmp_path)) == 3
    assert len(table(CSV.replace("south", "\nsouth"), tmp_path)) == 3


CODE = {"type": "category", "encode": "index"}
COUNTRIES = CODE | {"categories": ["NA", "EU"]}


@pytest.mark.parametrize(
    ("values", "entries", "rows"),
    [
        (["30.0"], {"type": "integer"}, [[30]]),
        (["1234567.5", "+1.2345675e6"], {"type": "number"}, [[1_234_567.5]] * 2),
        *((["70", "", "50"], {"type": "number", "fill": fill}, [[70], [40], [50]]) for fill in ("40", 40, 40.0)),
        (["70", ""], {"type": "number", "fill": 0}, [[70], [0]]),
        (["70", "", "50"], {"type": "number", "offset": 50, "scale": 20, "missing": "indicate"},
         [[1, 0], [0, 1], [0, 0]]),
        (["70", ""], {"type": "number", "fill": 30, "missing": "indicate"}, [[70, 0], [30, 1]]),
        # Of a longer text, by its place.
        (["194 - LUNG", "039 - NECK", "292 - HEART"],
         CODE | {"categories": ["194", "292"], "pattern": r"^0*(\d+)", "other": "drop", "scale": 2}, [[0], [0.5]]),
        # A listed category is a value although it may mean missing, as the code of Namibia.
        (["NA", "", "n/a"], COUNTRIES | {"missing": "indicate"}, [[0, 0], [0, 1], [0, 1]]),
        (["NA", "", "n/a"], COUNTRIES | {"fill": "EU"}, [[0], [1], [1]]),
        # A text whose category is "NA" is unknown, and no text at all is missing.
        (["1 A", None, "2 NA"], {"type": "category", "categories": ["A"], "other": "drop", "missing": "indicate",
                                 "pattern": r"\d (?P<ward>\w+)"}, [[1, 0], [0, 1]]),
    ],
)  # fmt: skip
def test_values_of_a_column(values: list[str | None], entries: dict[str, Any], rows: list[list[float]]) -> None:
    frame = pd.DataFrame({"hospital": "north", "ward": values, "cost": 1.0})
    found = encode(frame, schema(features=[{"name": "ward"} | entries]), "stays")
    assert found.features.tolist() == rows
    assert sum(found.left_out.values()) == len(values) - len(rows)


def test_rows_that_lack_values_may_be_left_out_and_the_classes_of_a_target_are_numbers(tmp_path: Path) -> None:
    rows = encode(table(CSV.replace("30", "").replace("B", "n/a"), tmp_path), schema(missing="drop"), "stays")
    assert rows.clients == ["north"]
    assert rows.left_out == {"age is missing": 1, "ward is missing": 1}
    for column, classes, kind in ((1, [0, 2, 1], np.int64), (2, [1, -1, -1], np.int8)):  # as losses take them
        found = encode(table(CSV, tmp_path), schema(**NUMBER, target=ENTRIES["features"][column]), "stays")
        assert (found.targets.tolist(), found.targets.dtype) == (classes, kind)
    target = schema(features=[{"name": "cost", "type": "number"}], target={"name": "ward"} | COUNTRIES)
    frame = pd.DataFrame({"hospital": "north", "ward": ["NA", "", "n/a"], "cost": 1.0})
    assert encode(frame, target, "stays", to_predict=True).labelled.tolist() == [True, False, False]


@pytest.mark.parametrize("lacking", ["x1_1", "x11", "X11"])
def test_no_column_of_the_table_stands_for_two(lacking: str) -> None:
    """Without their spaces, underscores and case, the names of a client, a target and a feature are the same."""
    names = {"x1_1": "client", "x11": "target", "X11": "feature"}
    own = schema(
        client={"name": "x1_1", "type": "text"},
        target={"name": "x11", "type": "number"},
        features=[{"name": "X11", "type": "number"}],
    )
    frame = pd.DataFrame({name: ["7"] for name in names})
    with raises(DatasetError, "data.missing-column", f"['{lacking}']"):
        encode(frame.drop(columns=lacking), own, "stays")
    unlabelled = encode(frame.drop(columns="x11"), own, "stays", to_predict=True)
    assert not unlabelled.labelled.any(), "a feature is not a target"


def test_clients_numbers_are_exact(tmp_path: Path) -> None:
    """As 64-bit numbers, these two would be one client."""
    numbered = CSV.replace("north", str(2**53)).replace("south", str(2**53 + 1))
    with raises(DatasetError, "data.bad-value", "hospital", "type text"):
        encode(table(numbered, tmp_path), schema(client={"name": "hospital", "type": "integer"}), "stays")
    assert len(set(encode(table(numbered, tmp_path), SCHEMA, "stays").clients)) == 2


def test_codes_are_exact() -> None:
    """As pandas reads integers of which one is missing, these two are one number."""
    codes = pd.Series([2**53, 2**53 + 1, None], dtype=np.float64)
    frame = pd.DataFrame({"hospital": "north", "ward": codes, "age": 1, "cost": 1.0})
    ward = {"name": "ward", "type": "category", "categories": [str(2**53)], "missing": "indicate"}
    with raises(DatasetError, "data.bad-value", "ward in data row 1", "1 more row", "as text"):
        encode(frame, schema(features=[ward]), "stays")
    own = schema(client={"name": "ward", "type": "text"}, features=[{"name": "age", "type": "number"}])
    with raises(DatasetError, "data.bad-value", "ward in data row 1", "as text"):
        encode(frame[:2], own, "stays")


@pytest.mark.parametrize("number", ["1,234", "-2,09"])
def test_a_comma_between_semicolons_may_be_a_decimal_one(tmp_path: Path, number: str) -> None:
    size = {"name": "size", "type": "number"}
    wanted = {",": float(number.replace(",", ".")), ".": 1234 if number == "1,234" else None}
    for rows in (f"a;{number}\nb;7\n", f"a;7\nb;{number}\n"):
        frame = table(f"hospital;size\n{rows}", tmp_path).assign(cost=1.0)
        with raises(DatasetError, "data.bad-value", "size in data row", repr(number), "decimal point"):
            encode(frame, schema(features=[size]), "stays")
        for decimal, value in wanted.items():
            if value is not None:
                rows_read = encode(frame, schema(features=[size | {"decimal": decimal}]), "stays").features
                assert rows_read.ravel().tolist()[rows.index(number) > 4] == np.float32(value)
    assert table(f"town;size\na;{number}\nb;small\n", tmp_path)["size"].tolist() == [number, "small"]


def test_a_code_is_the_same_with_a_decimal_point(tmp_path: Path) -> None:
    """As pandas writes a column of integers in which one is missing."""
    for codes, other in (["1", "2"], "2.0"), (["1.0", "2.0"], "2"), (["1", "2", "2.5"], "2.00"):
        feature = {"name": "ward", "type": "category", "categories": codes, "encode": "index"}
        rows = encode(table(f"hospital,ward,cost\nnorth,{other},1\n", tmp_path), schema(features=[feature]), "stays")
        assert rows.features.tolist() == [[1]]
        frame = pd.DataFrame({"hospital": ["north"], "ward": [2.0], "cost": [1.0]})
        assert encode(frame, schema(features=[feature]), "stays").features.tolist() == [[1]]
        dropped = schema(features=[feature | {"other": "drop"}])
        assert len(encode(frame, dropped, "stays").clients) == 1
    for both in ["2", "2.0"], ["2.0", "2"]:
        feature = {"name": "ward", "type": "category", "categories": both, "encode": "index"}
        rows = encode(table("hospital,ward,cost\nnorth,2.0,1\n", tmp_path), schema(features=[feature]), "stays")
        assert rows.features.tolist() == [[both.index("2.0")]], "where both are categories, each is itself"


def test_an_unknown_category_is_refused_counted_as_another_or_left_out(tmp_path: Path) -> None:
    frame = table(CSV, tmp_path)
    ward = {"name": "ward", "type": "category", "categories": ["A", "B"]}
    with raises(DatasetError, "data.bad-value", "ward", "row 2", "'Z'"):
        encode(frame, schema(features=[ward]), "stays")
    assert encode(frame, schema(features=[ward | {"other": "category"}]), "stays").features.argmax(1).tolist() == [
        0,
        2,
        1,
    ]
    rows = encode(frame, schema(features=[ward | {"other": "drop"}]), "stays")
    assert rows.clients == ["north", "north"]
    assert rows.places.tolist() == [0, 2]
    assert rows.left_out == {"ward is not one of its categories": 1}


def test_dates_that_are_no_texts_have_no_format() -> None:
    came = {"name": "came", "type": "date", "format": "%d.%m.%Y", "parts": ["days"], "since": "2024-01-01", "span": 1}
    values = ["03.01.2024", date(2024, 1, 3), pd.Timestamp("2024-01-03 23:00", tz="Asia/Tokyo"), None]
    for each in (values, pd.to_datetime(["2024-01-03", None])):
        frame = pd.DataFrame({"hospital": "north", "came": pd.Series(each), "cost": 1.0})
        found = encode(frame, schema(features=[came | {"fill": "01.01.2024"}]), "stays").features[:, 0]
        assert found.tolist() == [2.0] * (len(each) - 1) + [0.0]


# --- at a site


@pytest.fixture
def site(tmp_path: Path) -> dict[str, Path]:
    """A site's table and schema, and the register of its clients."""
    paths = {"path": tmp_path / "stays.csv", "schema": tmp_path / "schema.toml"}
    paths["path"].write_text(CSV)
    paths["schema"].write_text(TOML)
    return paths


def served(site: dict[str, Path], register: Numbers | None = None) -> Any:
    return read(site["path"], Numbers() if register is None else register, str(site["schema"]))


def test_a_table_is_served_by_client_whatever_the_order_of_its_rows(site: dict[str, Path]) -> None:
    one = served(site)
    assert (list(one.names), one.offsets.tolist()) == (["north", "south"], [0, 2, 3])
    assert one.manifest.split == {"train": 2, "validation": 0}
    head, *rows = CSV.splitlines()
    site["path"].write_text("\n".join([head, *reversed(rows)]))
    other = served(site)
    np.testing.assert_array_equal(one.features, other.features)
    np.testing.assert_array_equal(one.targets, other.targets)
    # Without a client column it is one client, and without rows none gets a number.
    site["schema"].write_text(f'name = "ours"\n[target]{TOML.partition("[target]")[2]}')
    assert list(served(site).names) == ["ours"]
    site["path"].write_text(head)
    with raises(DatasetError, "data.no-rows"):
        served(site, register := Numbers())
    assert register == []
