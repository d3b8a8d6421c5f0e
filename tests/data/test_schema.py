"""A schema says what a table's columns are, and is checked before any table is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.helpers.datasets import FEATURES, MANIFEST, OFFSETS, TARGETS
from tests.helpers.errors import raises
from umbel.data import Manifest, Schema, read_manifest, write_dataset
from umbel.protocol.errors import DatasetError

ENTRIES: dict[str, Any] = {
    "client": {"name": "hospital", "type": "text"},
    "target": {"name": "cost", "type": "number", "unit": "dollars", "scale": 10_000},
    "features": [
        {"name": "age", "type": "number", "unit": "years", "minimum": 0, "maximum": 120, "scale": 20, "offset": 50},
        {"name": "ward", "type": "category", "categories": ["A", "B"], "other": "category"},
        {"name": "smoker", "type": "boolean"},
    ],
}
SCHEMA = Schema.parse(ENTRIES)
TOML = tomli_w.dumps(ENTRIES)


def test_it_is_read_from_toml_from_json_and_from_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(TOML)
    (tmp_path / "own.json").write_text(json.dumps(SCHEMA.entries()))
    made = MANIFEST.model_copy(update={"layout": SCHEMA})
    write_dataset(tmp_path / "made", made, FEATURES, TARGETS, OFFSETS)
    for file in ("own.toml", "own.json", "made/manifest.json"):
        assert Schema.read(tmp_path / file) == SCHEMA
    assert read_manifest(tmp_path / "made") == made


def test_units_name_each_number_that_a_model_sees() -> None:
    assert SCHEMA.units["target"] == {"name": "cost", "unit": "dollars", "scale": 10_000}
    assert [one["name"] for one in SCHEMA.units["features"]] == [
        "age",
        "ward = A",
        "ward = B",
        "ward = other",
        "smoker",
    ]
    assert SCHEMA.units["features"][0] == {"name": "age", "unit": "years", "scale": 20, "offset": 50}
    # They stand in a manifest, which checks them.
    assert (
        Manifest(name="own", clients=1, split={"train": 1, "validation": 0}, units=SCHEMA.units).units == SCHEMA.units
    )


def test_a_toml_file_may_hold_dates_as_dates(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(f'{TOML}\n[[features]]\nname = "day"\ntype = "date"\nsince = 2024-02-29\n')
    assert Schema.read(tmp_path / "own.toml").features[-1].since == "2024-02-29"


def test_all_features_indicate_where_the_schema_does(tmp_path: Path) -> None:
    own = [{"name": "age", "type": "number"}, {"name": "day", "type": "date", "missing": "drop", "parts": ["days"]}]
    schema = Schema.parse(ENTRIES | {"missing": "indicate", "features": own})
    assert [column.missing for column in schema.features] == ["indicate", "drop"]
    assert [one["name"] for one in schema.units["features"]] == ["age", "age is missing", "day: days"]
    (tmp_path / "own.toml").write_text(tomli_w.dumps(schema.entries()))
    assert Schema.read(tmp_path / "own.toml") == schema


def feature(kind: str, **entries: Any) -> dict[str, Any]:
    return {"features": [{"name": "a", "type": kind} | entries]}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (feature("number", since="2020-01-01"), ("data.conflict", "since", "date")),
        (feature("date", since="May"), ("data.conflict", "'May'", "2000-01-31")),
        (feature("date", parts=["year", "year"]), ("data.conflict", "'year' twice")),
        (feature("date", format="%Y %z"), ("data.conflict", "time zones")),
        ({"target": {"name": "t", "type": "date"}}, ("data.conflict", "'t' is a date")),
        ({"target": {"name": "t", "type": "number", "missing": "indicate"}}, ("data.conflict", "'t'", "indicates")),
        ({"target": {"name": "cost", "type": "money"}}, ("data.wrong-value", "type", "'money'")),
        ({"target": {"name": "cost", "type": "number", "scael": 2}}, ("data.unknown-key", "scael", "scale?")),
        ({"target": {"name": "cost", "type": "number", "offset": 1}}, ("data.conflict", "'cost'", "offset")),
        ({"target": {"name": "cost", "type": "number", "scale": 0}}, ("data.conflict", "'cost'", "scale")),
        ({"target": {"name": "age", "type": "number"}}, ("data.conflict", "'age' twice")),
        ({"target": {"name": "t", "type": "category", "categories": ["a"]}}, ("data.conflict", "'t'", "one category")),
        ({"target": {"name": "t", "type": "text"}}, ("data.conflict", "'t'", "text")),
        ({"client": {"name": "hospital", "type": "number"}}, ("data.conflict", "'hospital'", "text", "integer")),
        (feature("category"), ("data.conflict", "'a'", "categories")),
        (feature("category", categories=["other"], other="category"), ("data.conflict", "'other' twice")),
        (feature("number", categories=["x"]), ("data.conflict", "categories")),
        (feature("boolean", scale=2), ("data.conflict", "scale", "boolean")),
        (feature("boolean", minimum=2), ("data.conflict", "minimum", "boolean")),
        (feature("number", minimum=2, maximum=1), ("data.conflict", "2", "1")),
        (feature("category", categories=["x"], pattern="("), ("data.conflict", "'('")),
        (feature("category", categories=["x"], pattern="x"), ("data.conflict", "'x'", "group")),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps(ENTRIES | changes))
    with raises(DatasetError, *parts, f"{file}: "):
        Schema.read(file)


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("own.toml", "client = ", "data.unreadable"),
        ("own.json", "[1]", "data.schema"),
        ("manifest.json", '{"name": "x", "clients": 3}', "data.schema"),
        ("own.toml", "", "data.missing-key"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, name: str, text: str, code: str) -> None:
    (tmp_path / name).write_text(text)
    with raises(DatasetError, code, name):
        Schema.read(tmp_path / name)
    with raises(DatasetError, "data.no-file"):
        Schema.read(tmp_path / "nowhere.toml")
