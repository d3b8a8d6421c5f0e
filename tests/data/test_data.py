"""Rows are handed out by client, and what is not what the format says is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from umbel.data import offsets_of, open_dataset, write_dataset
from umbel.protocol.errors import DatasetError


def test_offsets_are_running_sums_of_lengths() -> None:
    offsets = offsets_of([2, 1, 3])
    assert offsets.tolist() == [0, 2, 3, 6]
    assert offsets.dtype == np.int64


def test_client_owns_the_rows_between_its_offsets(folder: Path) -> None:
    features, targets = open_dataset(folder).client(2)
    assert features.tolist() == [[6, 7], [8, 9], [10, 11]]
    assert targets.tolist() == [3, 4, 5]


@pytest.mark.parametrize("name", ["features", "targets"])
def test_a_row_that_is_not_finite_is_named_with_its_file_and_client(folder: Path, name: str) -> None:
    array = np.load(folder / f"{name}.npy")
    array[3] = np.nan  # the first row of client 2
    np.save(folder / f"{name}.npy", array)
    with raises(DatasetError, "data.not-finite", folder, name, "client 2", "row 3"):
        open_dataset(folder)


def test_a_bad_row_is_found_behind_the_first_part_that_is_read(tmp_path: Path) -> None:
    features = np.zeros((70_001, 1), np.float32)
    features[70_000] = np.inf
    two = manifest(1, 1)
    with raises(DatasetError, "data.not-finite", "client 1", "row 70000"):
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
    with raises(DatasetError, "data.not-finite", name, "client 1", "row 2"):
        write_dataset(tmp_path / "own", own, arrays["features"], arrays["targets"], np.array([0, 2, 3]))


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ([0, 2, 6], ("data.offsets", "(clients + 1)", "int64", "(3,)")),
        ([0.0, 2.0, 3.0, 6.0], ("data.offsets", "(clients + 1)", "float64", "(4,)")),
        ([0, 2, 3, 5], ("data.offsets", "6 rows")),
        ([0, 2, 2, 6], ("data.empty-client", "client 1", "(offsets 2 to 2)")),
        ([0, 4, 3, 6], ("data.empty-client", "client 1", "(offsets 4 to 3)")),
        # Where numbers have no sign, a difference below zero wraps to a huge one.
        (np.array([0, 4, 3, 6], np.uint64), ("data.empty-client", "client 1", "(offsets 4 to 3)")),
    ],
)
def test_offsets_that_do_not_fit_are_refused(
    folder: Path, offsets: list[float] | NDArray[np.uint64], reason: tuple[str, ...]
) -> None:
    np.save(folder / "offsets.npy", np.array(offsets))
    with raises(DatasetError, *reason, folder):
        open_dataset(folder)


@pytest.mark.parametrize(
    ("name", "array", "reason"),
    [
        ("targets", np.zeros(5), ("data.lengths", "(6, 2)", "(5,)")),
        ("targets", np.float32(1), ("data.lengths", "(6, 2)")),
        ("features", np.zeros((6, 2), complex), ("data.not-numbers", "complex128")),
        ("targets", np.array(list("abcdef")), ("data.not-numbers", "<U1")),
        ("features", np.zeros((6, 0)), ("data.empty-rows", "(6, 0)", "(6,)")),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    folder: Path, name: str, array: NDArray[Any], reason: tuple[str, ...]
) -> None:
    np.save(folder / f"{name}.npy", array)
    with raises(DatasetError, *reason, folder):
        open_dataset(folder)
