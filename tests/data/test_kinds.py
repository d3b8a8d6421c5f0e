"""What a dataset may hold beside numbers: booleans, tokens, names of clients, and clients kept for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.datasets import FEATURES, MANIFEST, OFFSETS, TARGETS, manifest
from tests.helpers.errors import raises
from umbel.data import Dataset, open_dataset, write_dataset, write_leaf
from umbel.protocol.errors import DatasetError

TOKENS = np.array([[0, 4, 2], [1, 1, 1], [3, 2, 0], [0, 0, 0], [4, 4, 4], [1, 2, 3]], np.int32)
VOCABULARY = MANIFEST.model_copy(update={"tokens": 5})


def test_booleans_are_0_and_1(tmp_path: Path) -> None:
    write_dataset(tmp_path, MANIFEST, FEATURES > 3, TARGETS > 2, OFFSETS)
    read = open_dataset(tmp_path)
    assert (read.features.dtype, read.targets.dtype) == (np.uint8, np.uint8)
    assert read.targets.tolist() == [0, 0, 0, 1, 1, 1]
    # A folder that somebody else wrote is mapped as it is.
    np.save(tmp_path / "features.npy", FEATURES > 3)
    np.testing.assert_array_equal(open_dataset(tmp_path).features, FEATURES > 3)


def test_booleans_of_leaf_are_0_and_1(tmp_path: Path) -> None:
    write_leaf(tmp_path / "own.json", manifest(1), {"a": ([[True, False]], [True])})
    read = open_dataset(tmp_path / "own.json")
    assert (read.features.tolist(), read.targets.tolist()) == ([[1, 0]], [1])


def test_tokens_stay_integers_and_so_do_the_next_tokens(tmp_path: Path) -> None:
    write_dataset(tmp_path / "folder", VOCABULARY, TOKENS[:, :-1], TOKENS[:, 1:], OFFSETS)
    rows = {str(c): (TOKENS[a:b, :-1], TOKENS[a:b, 1:]) for c, (a, b) in enumerate([(0, 2), (2, 3), (3, 6)])}
    write_leaf(tmp_path / "own.json", VOCABULARY, rows)
    for name in ("folder", "own.json"):
        read = open_dataset(tmp_path / name)
        assert read.features.dtype.kind == read.targets.dtype.kind == "i"
        np.testing.assert_array_equal(read.features, TOKENS[:, :-1])
        np.testing.assert_array_equal(read.targets, TOKENS[:, 1:])


@pytest.mark.parametrize(
    ("tokens", "features", "reason"),
    [
        (4, TOKENS, ("row 0",)),
        (5, TOKENS - (TOKENS == 3) * 4, ("row 2",)),
        (5, TOKENS.astype(np.float32), ("float32",)),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(
    tmp_path: Path, tokens: int, features: Any, reason: tuple[str, ...]
) -> None:
    own = MANIFEST.model_copy(update={"tokens": tokens})
    with raises(DatasetError, "data.tokens", *reason):
        write_dataset(tmp_path, own, features, TARGETS, OFFSETS)


def test_clients_may_have_names(tmp_path: Path) -> None:
    write_dataset(str(tmp_path / "own"), MANIFEST, FEATURES, TARGETS, OFFSETS, ["a", "b", "ç"])
    assert list(open_dataset(tmp_path / "own").names) == ["a", "b", "ç"]
    with raises(DatasetError, "data.names", "2 names", "3 clients"):
        write_dataset(tmp_path / "own", MANIFEST, FEATURES, TARGETS, OFFSETS, ["a", "b"])
    (tmp_path / "own" / "clients.json").write_text("[1]")
    with raises(DatasetError, "data.names", "clients.json"):
        open_dataset(tmp_path / "own")


def test_test_clients_are_a_dataset_within(tmp_path: Path) -> None:
    kept = Dataset(manifest(0, 1), FEATURES[:2], TARGETS[:2], np.array([0, 2]))
    write_dataset(tmp_path / "own", MANIFEST, FEATURES, TARGETS, OFFSETS, test=kept)
    np.testing.assert_array_equal(open_dataset(tmp_path / "own" / "test").features, FEATURES[:2])
    # Writing the dataset again without test clients removes the old ones.
    write_dataset(tmp_path / "own", MANIFEST, FEATURES, TARGETS, OFFSETS)
    assert not (tmp_path / "own" / "test").exists()


def test_a_manifest_says_only_what_there_is(tmp_path: Path) -> None:
    write_dataset(tmp_path, MANIFEST, FEATURES, TARGETS, OFFSETS)
    assert not {"metric", "tokens", "layout", "part", "whole"} & set(
        json.loads((tmp_path / "manifest.json").read_text())
    )
