"""LEAF's JSON is written, read back, and refused with the reason where it cannot be used."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.datasets import LEAF, MANIFEST, assert_same, datasets, manifest, save_leaf
from tests.helpers.errors import raises
from umbel.data import Dataset, open_dataset, read_manifest, write_leaf
from umbel.protocol.errors import DatasetError


@settings(max_examples=50)
@given(st.booleans().flatmap(datasets))
def test_leaf_gives_back_what_was_written(dataset: Dataset) -> None:
    clients = {f"user-{i}": dataset.client(i) for i in range(dataset.manifest.clients)}
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "drawn.json"
        write_leaf(path, dataset.manifest, clients)
        read = open_dataset(path)
        assert_same(read, dataset)
        # JSON knows no widths: features become float32, and classes stay whole numbers.
        assert read.features.dtype == np.float32
        assert read.targets.dtype == dataset.targets.dtype
        assert read_manifest(path) == dataset.manifest


def test_leaf_lists_users_counts_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "two.json"
    own = manifest(1, 1, name="two")
    write_leaf(path, own, {"a": ([[1.0, 2.0]], [0]), "b": (np.eye(2), np.array([1, 0]))})
    document = json.loads(path.read_text())
    assert document["users"] == ["a", "b"]
    assert document["num_samples"] == [1, 2]
    assert document["user_data"]["b"] == {"x": [[1.0, 0.0], [0.0, 1.0]], "y": [1, 0]}
    assert document["manifest"]["split"] == {"train": 1, "validation": 1}


def test_leaf_without_manifest_trains_all_users_and_takes_the_name_of_its_file(tmp_path: Path) -> None:
    dataset = open_dataset(save_leaf(tmp_path / "theirs.json"))
    assert dataset.manifest == manifest(2, 0, name="theirs")
    assert dataset.client(1)[0].tolist() == [[3, 4], [5, 6]]
    assert dataset.targets.tolist() == [0, 1, 0]


def test_leaf_targets_are_numbers_if_any_clients_are(tmp_path: Path) -> None:
    data = {"a": {"x": [[1, 2]], "y": [1]}, "b": {"x": [[3, 4], [5, 6]], "y": [0.5, 2]}}
    targets = open_dataset(save_leaf(tmp_path / "mixed.json", user_data=data)).targets
    assert targets.tolist() == [1, 0.5, 2]
    assert targets.dtype == np.float32


def test_leaf_that_fails_its_check_leaves_the_old_file(tmp_path: Path) -> None:
    path = save_leaf(tmp_path / "small.json")
    own = manifest(1, 0, name="small")
    with raises(DatasetError, "data.not-finite", "client 0", "row 0"):
        write_leaf(path, own, {"a": ([[1.0]], [np.inf])})
    assert json.loads(path.read_text()) == LEAF
    assert list(tmp_path.iterdir()) == [path], "no scratch file stays behind"


def test_leaf_that_does_not_fit_its_manifest_is_named_by_its_own_path(tmp_path: Path) -> None:
    with raises(DatasetError, "data.lengths", f"{tmp_path}/small.json", "1 users", "3 clients"):
        write_leaf(tmp_path / "small.json", MANIFEST, {"a": ([[1.0]], [1.0])})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with raises(DatasetError, "data.no-file", f"{tmp_path}/none.json"):
        open_dataset(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_samples": [1]}, "users and num_samples must be lists of one length"),
        ({"users": {"a": 0, "b": 1}}, "users and num_samples must be lists of one length"),
        ({"num_samples": 2}, "users and num_samples must be lists of one length"),
        ({"users": ["a", "a"]}, "users names a client twice"),
        ({"users": ["a", 2]}, "the names in users must be text, got 2"),
        ({"users": ["a", ["b"]]}, r"the names in users must be text, got \['b'\]"),
        (
            {"user_data": LEAF["user_data"] | {"a": {"x": [[1, 1e300]], "y": [0]}}},
            "features of client 0, row 0, are not finite, or larger than a model can take",
        ),
        (
            {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": 1, "y": [0]}}},
            "client 'a' needs rectangular lists x and y in user_data",
        ),
        (
            {"users": ["a"], "num_samples": [0], "user_data": {"a": {"x": [], "y": []}}},
            "client 'a' has no rows; leave it out",
        ),
        (
            {"user_data": LEAF["user_data"] | {"a": {"x": [[1, 2]], "y": [[0]]}}},
            "clients differ in the shape of a row of y",
        ),
        ({"num_samples": [1, 3]}, "client 'b' has 2 x, 2 y and num_samples 3; make them equal"),
        ({"users": ["a", "c"]}, "client 'c' needs rectangular lists x and y in user_data"),
        (
            {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[1, 2], [3]], "y": [0, 1]}}},
            "client 'a' needs rectangular lists x and y in user_data",
        ),
        (
            {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [["1", "2"]], "y": [0]}}},
            "client 'a' holds values that are not numbers",
        ),
        (
            {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1, None]], "y": [0]}}},
            "client 'a' holds values that are not numbers",
        ),
        (
            {"user_data": LEAF["user_data"] | {"a": {"x": [[1]], "y": [0]}}},
            "clients differ in the shape of a row of x",
        ),
        (
            {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1, float("nan")]], "y": [0]}}},
            "features of client 0, row 0, are not finite",
        ),
        ({"users": [], "num_samples": [], "user_data": {}}, "the dataset has no clients"),
        (
            {"manifest": {"name": "three", "clients": 3, "split": {"train": 2, "validation": 1}}},
            "2 users but the manifest says 3 clients",
        ),
        (
            {"manifest": {"name": "two", "clients": 2, "split": {"train": 2, "validation": 1}}},
            "split {.*} does not add up to 2 clients",
        ),
    ],
)
def test_leaf_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = save_leaf(tmp_path / "bad.json", **changes)
    with pytest.raises(DatasetError, match=f"{path}: {reason}"):
        open_dataset(path)


def test_a_number_of_too_many_digits_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"users": ' + "9" * 5000 + "}")
    with raises(DatasetError, "data.unreadable", path):
        read_manifest(path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"users": [], "num_samples": []}'])
def test_json_that_is_not_leaf_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with raises(DatasetError, "data.leaf", path, "num_samples", "user_data"):
        read_manifest(path)
