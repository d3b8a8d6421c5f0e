"""Rows are handed out by client, whole or in parts; what is not what the format says is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.helpers.datasets import FEATURES, MANIFEST, OFFSETS, TARGETS, manifest
from tests.helpers.errors import raises
from umbel.client.cohort import Cohort
from umbel.data import Dataset, check, offsets_of, open_dataset, write_dataset, write_leaf
from umbel.protocol.errors import DatasetError


def test_a_client_owns_the_rows_between_its_offsets_which_are_sums_of_lengths(folder: Path) -> None:
    assert (offsets_of([2, 1, 3]).tolist(), offsets_of([2]).dtype) == ([0, 2, 3, 6], np.int64)
    features, targets = open_dataset(folder).client(2)
    assert features.tolist() == [[6, 7], [8, 9], [10, 11]]
    assert targets.tolist() == [3, 4, 5]


@pytest.mark.parametrize("name", ["features", "targets"])
def test_a_row_that_is_not_finite_is_named_with_its_file_and_client(folder: Path, name: str, tmp_path: Path) -> None:
    array = np.load(folder / f"{name}.npy")
    array[3] = np.nan  # the first row of client 2
    np.save(folder / f"{name}.npy", array)
    with raises(DatasetError, "data.not-finite", folder, name, "client 2", "row 3"):
        open_dataset(folder)
    # And behind the first part that is read.
    features = np.zeros((70_001, 1), np.float32)
    features[70_000] = np.inf
    with raises(DatasetError, "data.not-finite", "client 1", "row 70000"):
        write_dataset(tmp_path / "long", manifest(1, 1), features, np.zeros(70_001), np.array([0, 70_000, 70_001]))


@pytest.mark.parametrize(
    ("name", "value", "kind", "scale"),
    [
        ("features", 1e300, "float64", 1.0),
        ("targets", -1e39, "float64", 1.0),
        ("features", 1e30, "float32", 1e9),
        ("features", 2**40, "int64", 1e30),
        ("targets", 2**63, "uint64", 1.0),
    ],
)
def test_a_number_that_a_model_would_get_as_infinite_is_found(
    tmp_path: Path, name: str, value: float, kind: str, scale: float
) -> None:
    arrays = {"features": np.zeros((3, 1), kind), "targets": np.zeros(3, kind)}
    arrays[name][2] = value
    own = manifest(1, 1, feature_scale=scale)
    with raises(DatasetError, "data.not-finite", name, "client 1", "row 2"):
        write_dataset(tmp_path / "own", own, arrays["features"], arrays["targets"], np.array([0, 2, 3]))


@pytest.mark.parametrize(
    ("name", "array", "reason"),
    [
        ("offsets", [0, 2, 6], ("data.offsets", "(clients + 1)", "int64", "(3,)")),
        ("offsets", [0.0, 2.0, 3.0, 6.0], ("data.offsets", "(clients + 1)", "float64", "(4,)")),
        ("offsets", [0, 2, 3, 5], ("data.offsets", "6 rows")),
        ("offsets", [0, 2, 2, 6], ("data.empty-client", "client 1", "(offsets 2 to 2)")),
        ("offsets", [0, 4, 3, 6], ("data.empty-client", "client 1", "(offsets 4 to 3)")),
        # Where numbers have no sign, a difference below zero wraps to a huge one.
        ("offsets", np.array([0, 4, 3, 6], np.uint64), ("data.empty-client", "client 1", "(offsets 4 to 3)")),
        ("targets", np.zeros(5), ("data.lengths", "(6, 2)", "(5,)")),
        ("targets", np.float32(1), ("data.lengths", "(6, 2)")),
        ("features", np.zeros((6, 2), complex), ("data.not-numbers", "complex128")),
        ("targets", np.array(list("abcdef")), ("data.not-numbers", "<U1")),
        ("features", np.zeros((6, 0)), ("data.empty-rows", "(6, 0)", "(6,)")),
    ],
)
def test_arrays_that_do_not_fit_are_refused(folder: Path, name: str, array: Any, reason: tuple[str, ...]) -> None:
    np.save(folder / f"{name}.npy", array)
    with raises(DatasetError, *reason, folder):
        open_dataset(folder)


@pytest.mark.parametrize("kind", [list, pd.DataFrame, torch.tensor])
def test_what_becomes_an_array_is_written_as_one(tmp_path: Path, kind: Any) -> None:
    write_dataset(tmp_path / "own", MANIFEST, kind(FEATURES), TARGETS.tolist(), OFFSETS.tolist())  # type: ignore[arg-type]
    assert np.array_equal(open_dataset(tmp_path / "own").features, FEATURES)


@pytest.mark.parametrize("name", ["features", "targets", "offsets"])
def test_masked_values_are_missing(tmp_path: Path, name: str) -> None:
    arrays = {"features": FEATURES, "targets": TARGETS, "offsets": OFFSETS}
    arrays[name] = np.ma.masked_equal(arrays[name], arrays[name].ravel()[1])
    with raises(DatasetError, "data.missing-value", name):
        write_dataset(tmp_path / "own", MANIFEST, **arrays)
    with raises(DatasetError, "data.missing-value", "own.csv", name):
        check(Dataset(MANIFEST, **arrays), Path("own.csv"))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"features": FEATURES.tolist()}, "data.not-numbers"),
        ({"offsets": OFFSETS.tolist()}, "data.not-numbers"),
        ({"manifest": MANIFEST.model_dump()}, "data.manifest"),
        ({"names": [1, 2, 3]}, "data.names"),
        ({"names": ["a", "b", "a"]}, "data.twice"),
    ],
)
def test_parts_of_other_types_are_refused(changes: dict[str, Any], code: str) -> None:
    own: dict[str, Any] = {"manifest": MANIFEST, "features": FEATURES, "targets": TARGETS, "offsets": OFFSETS}
    with raises(DatasetError, code, "own.csv"):
        check(Dataset(**own | changes), Path("own.csv"))


@pytest.mark.parametrize("kind", [np.uint64, np.uint32, np.int32])
def test_offsets_are_integers_of_any_type(folder: Path, kind: type[np.integer[Any]]) -> None:
    np.save(folder / "offsets.npy", OFFSETS.astype(kind))
    assert len(Cohort.gather(open_dataset(folder), [2, 0], torch.device("cpu")).features) == 5


# --- beside numbers: booleans, tokens, names, and clients kept for a test

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
