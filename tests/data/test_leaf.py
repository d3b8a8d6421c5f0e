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
from tests.helpers.examples import examples
from umbel.data import Dataset, open_dataset, read_manifest, write_leaf
from umbel.protocol.errors import DatasetError


@settings(max_examples=examples(10))
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
    assert path.stat().st_mode & 0o777 == 0o600
    document = json.loads(path.read_text())
    assert document["users"] == ["a", "b"]
    assert document["num_samples"] == [1, 2]
    assert document["user_data"]["b"] == {"x": [[1.0, 0.0], [0.0, 1.0]], "y": [1, 0]}
    assert document["manifest"]["split"] == {"train": 1, "validation": 1}


def test_leaf_without_manifest_trains_all_users_and_takes_the_name_of_its_file(tmp_path: Path) -> None:
    dataset = open_dataset(save_leaf(tmp_path / "theirs.json"))
    assert dataset.manifest == manifest(2, 0, name="theirs")
    assert list(dataset.names) == ["a", "b"]
    assert dataset.client(1)[0].tolist() == [[3, 4], [5, 6]]
    assert dataset.targets.tolist() == [0, 1, 0]


def test_leaf_targets_are_numbers_if_any_clients_are(tmp_path: Path) -> None:
    data = {"a": {"x": [[1, 2]], "y": [1]}, "b": {"x": [[3, 4], [5, 6]], "y": [0.5, 2]}}
    targets = open_dataset(save_leaf(tmp_path / "mixed.json", user_data=data)).targets
    assert targets.tolist() == [1, 0.5, 2]
    assert targets.dtype == np.float32


def test_leaf_that_fails_its_check_leaves_the_old_file_and_is_named_by_its_own_path(tmp_path: Path) -> None:
    path = save_leaf(tmp_path / "small.json")
    with raises(DatasetError, "data.not-finite", "client 0", "row 0"):
        write_leaf(path, manifest(1, 0, name="small"), {"a": ([[1.0]], [np.inf])})
    with raises(DatasetError, "data.lengths", path, "1 users", "3 clients"):
        write_leaf(path, MANIFEST, {"a": ([[1.0]], [1.0])})
    assert json.loads(path.read_text()) == LEAF
    assert list(tmp_path.iterdir()) == [path], "no scratch file stays behind"


def one(**data: Any) -> dict[str, Any]:
    """A file of one user, of one row unless its `y` says otherwise."""
    return {"users": ["a"], "num_samples": [len(data["y"])], "user_data": {"a": data}}


THREE = {"name": "three", "clients": 3, "split": {"train": 2, "validation": 1}}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_samples": [1]}, ("data.leaf", "users and num_samples")),
        ({"users": ["a", "a"]}, ("data.twice", "users")),
        ({"users": ["a", ["b"]]}, ("data.leaf", "users", "['b']")),
        ({"num_samples": [1, 3]}, ("data.lengths", "'b'", "num_samples 3")),
        ({"users": ["a", "c"]}, ("data.leaf", "'c'", "user_data")),
        (one(x=[], y=[]), ("data.empty-client", "'a'")),
        (one(x=[[1, 2], [3]], y=[0, 1]), ("data.leaf", "'a'", "user_data")),
        (one(x=[["1", "2"]], y=[0]), ("data.not-numbers", "'a'")),
        (one(x=[[1, float("nan")]], y=[0]), ("data.not-finite", "features of client 0, row 0")),
        ({"user_data": LEAF["user_data"] | {"a": {"x": [[1, 2]], "y": [[0]]}}}, ("data.shape", "row of y")),
        ({"user_data": LEAF["user_data"] | {"a": {"x": [[1]], "y": [0]}}}, ("data.shape", "row of x")),
        ({"users": [], "num_samples": [], "user_data": {}}, ("data.no-rows",)),
        ({"manifest": THREE}, ("data.lengths", "2 users", "3 clients")),
    ],
)
def test_leaf_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    path = save_leaf(tmp_path / "bad.json", **changes)
    with raises(DatasetError, *parts, path):
        open_dataset(path)


def test_json_that_is_not_leaf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for content, code in (('{"users": ' + "9" * 5000 + "}", "unreadable"), ("[]", "leaf"), ('{"users": []}', "leaf")):
        path.write_text(content)
        with raises(DatasetError, f"data.{code}", path):
            read_manifest(path)
