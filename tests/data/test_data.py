"""Rows are handed out by client, and what is not what the format says is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.datasets import manifest
from umbel.data import offsets_of, open_dataset, write_dataset
from umbel.protocol.errors import DatasetError


def test_offsets_are_running_sums_of_lengths() -> None:
    offsets = offsets_of([2, 1, 3])
    assert offsets.tolist() == [0, 2, 3, 6]
    assert offsets.dtype == np.int64


def test_offsets_of_no_clients_hold_only_zero() -> None:
    assert offsets_of([]).tolist() == [0]


def test_client_owns_the_rows_between_its_offsets(folder: Path) -> None:
    features, targets = open_dataset(folder).client(2)
    assert features.tolist() == [[6, 7], [8, 9], [10, 11]]
    assert targets.tolist() == [3, 4, 5]


@pytest.mark.parametrize("name", ["features", "targets"])
def test_a_row_that_is_not_finite_is_named_with_its_file_and_client(folder: Path, name: str) -> None:
    array = np.load(folder / f"{name}.npy")
    array[3] = np.nan  # the first row of client 2
    np.save(folder / f"{name}.npy", array)
    with pytest.raises(DatasetError, match=f"{folder}: {name} of client 2, row 3, are not finite, or"):
        open_dataset(folder)


def test_a_bad_row_is_found_behind_the_first_part_that_is_read(tmp_path: Path) -> None:
    features = np.zeros((70_001, 1), np.float32)
    features[70_000] = np.inf
    two = manifest(1, 1)
    with pytest.raises(DatasetError, match="features of client 1, row 70000, are not finite"):
        write_dataset(tmp_path / "long", two, features, np.zeros(70_001), np.array([0, 70_000, 70_001]))


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
    with pytest.raises(DatasetError, match=f"{name} of client 1, row 2, are not finite, or larger than a model"):
        write_dataset(tmp_path / "own", own, arrays["features"], arrays["targets"], np.array([0, 2, 3]))


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ([0, 2, 6], r"offsets must be 4 whole numbers \(clients \+ 1\), got int64 of shape \(3,\)"),
        ([0.0, 2.0, 3.0, 6.0], r"offsets must be 4 whole numbers \(clients \+ 1\), got float64 of shape \(4,\)"),
        ([1, 2, 3, 6], "offsets must run from 0 to 6 rows, got 1 to 6"),
        ([0, 2, 3, 5], "offsets must run from 0 to 6 rows, got 0 to 5"),
        ([0, 2, 2, 6], r"client 1 has no rows \(offsets 2 to 2\); leave it out"),
        ([0, 4, 3, 6], r"client 1 has no rows \(offsets 4 to 3\); leave it out"),
        # Where numbers have no sign, a difference below zero wraps to a huge one.
        (np.array([0, 4, 3, 6], np.uint64), r"client 1 has no rows \(offsets 4 to 3\); leave it out"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(
    folder: Path, offsets: list[float] | NDArray[np.uint64], reason: str
) -> None:
    np.save(folder / "offsets.npy", np.array(offsets))
    with pytest.raises(DatasetError, match=f"{folder}: {reason}"):
        open_dataset(folder)


@pytest.mark.parametrize(
    ("name", "array", "reason"),
    [
        ("targets", np.zeros(5), r"features \(6, 2\) and targets \(5,\) must have the same number of rows"),
        ("targets", np.float32(1), r"features \(6, 2\) and targets \(\) must have the same number of rows"),
        ("features", np.zeros((6, 2), complex), "features must be numbers or booleans, got complex128"),
        ("targets", np.array(list("abcdef")), "targets must be numbers or booleans, got <U1"),
        ("features", np.zeros((6, 0)), r"rows of features \(6, 0\) or targets \(6,\) are empty"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(folder: Path, name: str, array: NDArray[Any], reason: str) -> None:
    np.save(folder / f"{name}.npy", array)
    with pytest.raises(DatasetError, match=f"{folder}: {reason}"):
        open_dataset(folder)
