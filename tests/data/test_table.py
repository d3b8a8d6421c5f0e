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
from umbel.protocol.errors import DatasetError, SiteError

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


def test_a_parquet_file_is_read_as_a_csv_is(tmp_path: Path) -> None:
    typed = pd.DataFrame(
        {"hospital": ["north"], "age": [70], "ward": ["A"], "smoker": [True], "cost": [12_000.0], "unused": [None]}
    )
    typed.to_parquet(tmp_path / "stays.parquet")
    rows = encode(read_table(tmp_path / "stays.parquet"), SCHEMA, "stays")
    np.testing.assert_array_equal(rows.features, [[1, 1, 0, 0, 1]])
    np.testing.assert_array_equal(rows.targets, np.array([1.2], np.float32))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_a_byte_order_mark_and_columns_without_a_name_play_no_part(tmp_path: Path, separator: str) -> None:
    text = "\ufeffHospital_,Age,ward,SMOKER,cost,,\nnorth,70,A,1,12000,,,,,\nnorth,70,A,1,12000,,\n"
    rows = encode(table(text.replace(",", separator), tmp_path), SCHEMA, "stays")
    np.testing.assert_array_equal(rows.features, [[1, 1, 0, 0, 1]] * 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CSV.replace("70,A", "70,A,7"), ("data.missing-column", "row 1", "column 6")),
        (CSV.replace("70,A", "70,A,,,,7"), ("data.missing-column", "row 1", "column 7")),
        (
            "\n".join(f"{',' if n == 0 else '7,'}{line}" for n, line in enumerate(CSV.splitlines())),
            ("data.missing-column", "column 1,"),
        ),
        (CSV.replace("70,A", "70,A" + 200 * ","), ("data.unreadable", "fields")),
        (CSV.replace("ward", "age"), ("data.twice", "'age'")),
        ("", ("data.unreadable",)),
    ],
)
def test_a_csv_that_is_none_is_refused(tmp_path: Path, text: str, reason: tuple[str, ...]) -> None:
    with raises(DatasetError, *reason):
        table(text, tmp_path)


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


def test_bytes_that_are_no_letters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "stays.csv").write_bytes(b"age,cost\n\x81,1\n")
    with raises(DatasetError, "data.unreadable", "UTF-8"):
        read_table(tmp_path / "stays.csv")


def test_an_empty_line_is_a_missing_value_of_a_single_column(tmp_path: Path) -> None:
    assert len(table("age\n30\n\n40\n", tmp_path)) == 3
    assert len(table(CSV.replace("south", "\nsouth"), tmp_path)) == 3


def test_two_columns_that_may_be_the_same_are_refused(tmp_path: Path) -> None:
    frame = table(CSV, tmp_path).rename(columns={"age": "Age"}).assign(AGE="7")
    with raises(DatasetError, "data.twice", "'Age'", "'AGE'"):
        encode(frame, SCHEMA, "stays")
    assert encode(frame.assign(age="50"), SCHEMA, "stays").features[0, 0] == 0, "the exact name wins"
    frame.columns = [name.lower() for name in frame.columns]
    with raises(DatasetError, "data.twice", "'age'"):
        encode(frame, SCHEMA, "stays")


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


def test_names_may_have_commas_where_semicolons_separate(tmp_path: Path) -> None:
    frame = table("height, cm;weight, kg;town\n1;2;a\n", tmp_path)
    assert list(frame.columns) == ["height, cm", "weight, kg", "town"]
    with raises(DatasetError, "data.twice", "'age'"):
        table("age, age\n1,2\n", tmp_path)


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


def test_a_parquet_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with raises(DatasetError, "data.unreadable"):
        table("no", tmp_path, "stays.parquet")
    with raises(DatasetError, "data.no-file", "nowhere.csv"):
        read_table(tmp_path / "nowhere.csv")
    (tmp_path / "stays.json").write_text('[{"age": 30}]')
    with raises(DatasetError, "data.unreadable", "stays.json"):
        read_table(tmp_path / "stays.json")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("ward", "room", ("data.missing-column", "stays", "['ward']", "'age', 'room', 'smoker'")),
        ("30", "thirty", ("data.bad-value", "age", "row 2", "'thirty'")),
        ("30", "1,5", ("data.bad-value", "age", "row 2", "'1,5'")),
        ("30", "130", ("data.bad-value", "age", "row 2", "'130'", "0 to 120")),
        ("30", "", ("data.missing-value", "age", "row 2", 'missing = "drop"')),
        ("30", " NA ", ("data.missing-value", "age", "row 2")),
        ("no", "maybe", ("data.bad-value", "smoker", "row 2", "'maybe'", "1 more row)")),
        ("south", "", ("data.missing-value", "hospital", "row 2")),
        ("5000", "1e999", ("data.bad-value", "cost", "row 2", "'1e999'")),
    ],
)  # fmt: skip
def test_the_first_bad_row_is_named(tmp_path: Path, old: str, new: str, reason: tuple[str, ...]) -> None:
    changed = CSV.replace(old, f'"{new}"' if "," in new else new)
    with raises(DatasetError, *reason):
        encode(table(changed, tmp_path), SCHEMA, "stays")


def test_a_whole_number_is_one(tmp_path: Path) -> None:
    whole = with_feature(type="integer")
    assert encode(table(CSV.replace("30", "30.0"), tmp_path), whole, "stays").features[1] == 30
    with raises(DatasetError, "data.bad-value", "age", "row 2", "'30.5'"):
        encode(table(CSV.replace("30", "30.5"), tmp_path), whole, "stays")


@pytest.mark.parametrize("number", ["1,234,567.5", "$1,234,567.5", "1234567.5", " 1234567.5", "+1.2345675e6"])
def test_numbers_as_people_write_them(tmp_path: Path, number: str) -> None:
    rows = encode(table(CSV.replace("30", f'"{number}"'), tmp_path), with_feature(), "stays")
    assert rows.features[1] == 1_234_567.5


@pytest.mark.parametrize("text", ["12,34", "1,2345", "0,250", "1.2.3", "12 %", "0x10", "$", "$5$", "--1", "1_000"])
def test_what_may_be_another_number_is_none(tmp_path: Path, text: str) -> None:
    with raises(DatasetError, "data.bad-value"):
        encode(table(CSV.replace("30", f'"{text}"'), tmp_path), with_feature(), "stays")


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


def test_a_category_in_a_longer_text_and_by_its_place(tmp_path: Path) -> None:
    text = CSV.replace("A,yes", "194 - LUNG,yes").replace("Z", "039 - NECK").replace("B,no", "292 - HEART,no")
    drg = {"name": "ward", "type": "category", "categories": ["194", "292"], "pattern": r"^0*(\d+)", "other": "drop"}
    rows = encode(table(text, tmp_path), schema(features=[drg | {"encode": "index", "scale": 2}]), "stays")
    assert rows.features.tolist() == [[0], [0.5]]


def test_a_missing_value_is_left_out_or_filled_in(tmp_path: Path) -> None:
    frame = table(CSV.replace("30", "").replace("B", "n/a"), tmp_path)
    rows = encode(frame, schema(missing="drop"), "stays")
    assert rows.clients == ["north"]
    assert rows.left_out == {"age is missing": 1, "ward is missing": 1}
    for fill in ("40", 40, 40.0, 0):
        filled = encode(frame, with_feature(fill=fill), "stays")
        assert filled.features.tolist() == [[70], [float(fill)], [50]]


def test_a_listed_category_is_a_value_although_it_may_mean_missing(tmp_path: Path) -> None:
    """As the code of Namibia; the rest of the column lacks values as ever."""
    frame = table("hospital,ward,cost\nnorth,NA,1\nnorth,,2\nnorth,n/a,3\n", tmp_path)
    country = {"name": "ward", "type": "category", "categories": ["NA", "EU"], "encode": "index"}
    rows = encode(frame, schema(features=[country | {"missing": "indicate"}]), "stays")
    assert rows.features.tolist() == [[0, 0], [0, 1], [0, 1]]
    assert encode(frame, schema(features=[country | {"fill": "EU"}]), "stays").features.tolist() == [[0], [1], [1]]
    target = schema(features=[{"name": "cost", "type": "number"}], target=country | {"encode": "one-hot"})
    assert encode(frame, target, "stays", to_predict=True).labelled.tolist() == [True, False, False]


def test_a_missing_value_is_not_an_unknown_category() -> None:
    """A text whose category is "NA" is unknown, and no text at all is missing."""
    ward = {"name": "ward", "type": "category", "categories": ["A"], "other": "drop", "missing": "indicate"}
    frame = pd.DataFrame({"hospital": "north", "ward": ["1 A", None, "2 NA"], "cost": 1.0})
    rows = encode(frame, schema(features=[ward | {"pattern": r"\d (?P<ward>\w+)"}]), "stays")
    assert rows.features.tolist() == [[1, 0], [0, 1]]
    assert rows.left_out == {"ward is not one of its categories": 1}


@pytest.mark.parametrize(("value", "scale"), [("1e39", 1), ("-1e300", 1e-20)])
def test_a_number_too_large_for_32_bits_is_named(tmp_path: Path, value: str, scale: float) -> None:
    changed = table(CSV.replace("30", value), tmp_path)
    with raises(DatasetError, "data.bad-value", "age in data row 2", repr(value), "32 bits"):
        encode(changed, with_feature(scale=scale), "stays")
    target = {"name": "age", "type": "number", "scale": scale}
    with raises(DatasetError, "data.bad-value", "age in data row 2", repr(value), "32 bits"):
        encode(changed, schema(target=target, features=[{"name": "cost", "type": "number"}]), "stays")


def test_dates_that_are_no_texts_have_no_format() -> None:
    came = {"name": "came", "type": "date", "format": "%d.%m.%Y", "parts": ["days"], "since": "2024-01-01", "span": 1}
    values = ["03.01.2024", date(2024, 1, 3), pd.Timestamp("2024-01-03 23:00", tz="Asia/Tokyo"), None]
    for each in (values, pd.to_datetime(["2024-01-03", None])):
        frame = pd.DataFrame({"hospital": "north", "came": pd.Series(each), "cost": 1.0})
        found = encode(frame, schema(features=[came | {"fill": "01.01.2024"}]), "stays").features[:, 0]
        assert found.tolist() == [2.0] * (len(each) - 1) + [0.0]


def test_the_classes_of_a_target(tmp_path: Path) -> None:
    frame = table(CSV, tmp_path)
    age = [ENTRIES["features"][0]]
    ward = encode(frame, schema(features=age, target=ENTRIES["features"][1]), "stays")
    assert (ward.targets.tolist(), ward.targets.dtype) == ([0, 2, 1], np.int64)
    # As the losses of a margin take them.
    smoker = encode(frame, schema(features=age, target=ENTRIES["features"][2]), "stays")
    assert (smoker.targets.tolist(), smoker.targets.dtype) == ([1, -1, -1], np.int8)


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


def test_a_client_keeps_its_number(site: dict[str, Path]) -> None:
    """The ledger charges by number: nobody may get another's budget."""
    register = Numbers()
    served(site, register)
    site["path"].write_text(f"{CSV}mid,30,A,no,1000\n")
    assert list(served(site, register).names) == register == ["north", "south", "mid"]
    site["path"].write_text(CSV)
    with raises(DatasetError, "data.gone-clients", "'mid'"):
        served(site, register)


def test_a_table_without_a_client_column_is_one_client(site: dict[str, Path]) -> None:
    head, _, rest = TOML.partition("[target]")
    assert "client" in head
    site["schema"].write_text(f'name = "ours"\n[target]{rest}')
    assert list(served(site).names) == ["ours"]


def test_a_site_says_which_schema(site: dict[str, Path]) -> None:
    with raises(SiteError, "site.no-schema", "schema=/path/to/schema.toml"):
        read(site["path"], Numbers())
    site["path"].write_text(CSV.splitlines()[0] + "\n")
    register = Numbers()
    with raises(DatasetError, "data.no-rows"):
        served(site, register)
    assert register == []
