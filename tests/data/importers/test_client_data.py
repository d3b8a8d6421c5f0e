"""Rows split into clients: who trains, who validates, who is kept for a test, and where they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from umbel.data import find_dataset, open_dataset
from umbel.data.importers.client_data import folder_of, split_into_clients
from umbel.protocol.errors import DatasetError, DiskError

# Client c of ten has the rows c and 10 + c.
OWNERS = [f"c{row % 10}" for row in range(20)]
ROWS = np.arange(20, dtype=np.float32)


def data(**options: Any) -> Any:
    return split_into_clients(ROWS[:, None], ROWS, OWNERS, **options)


def test_each_client_keeps_its_rows_in_order() -> None:
    made = data(validation=0.3, test=0.2)
    assert made.manifest.split == {"train": 5, "validation": 3}
    assert made.test.manifest.split == {"train": 0, "validation": 2}
    assert {*made.dataset.names, *made.test.names} == set(OWNERS)
    for part in (made.dataset, made.test):
        for index, name in enumerate(part.names):
            first = int(name[1:])
            np.testing.assert_array_equal(part.client(index)[1], [first, first + 10])


@pytest.mark.parametrize(
    ("options", "validation", "test"),
    [
        ({"validation": ["c3", "c1", "c3"], "test": ["c7"]}, ["c3", "c1"], ["c7"]),
        ({"validation": 0.001}, 1, []),  # a share that is not 0 is one client at least
        ({"validation": 0}, 0, []),
    ],
)
def test_clients_are_split_by_name_or_share(options: dict[str, Any], validation: Any, test: list[str]) -> None:
    made = data(**options)
    several = len(validation) if isinstance(validation, list) else validation
    assert made.manifest.split == {"train": 10 - several - len(test), "validation": several}
    assert len(made.dataset.targets) == 20 - 2 * len(test), "a name may be repeated"
    if test:
        assert (list(made.dataset.names)[-2:], list(made.test.names)) == (validation, test)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"validation": 1.0}, ("1.0",)),
        ({"validation": 0.96}, ("10 clients",)),
        ({"validation": ["c11"]}, ("'c11'", "'c0'")),
        ({"validation": ["c1"], "test": ["c1"]}, ("'c1'",)),
    ],
)
def test_a_split_that_cannot_be_is_refused(options: dict[str, Any], reason: tuple[str, ...]) -> None:
    with raises(DatasetError, "data.split", *reason):
        data(**options)


def test_a_name_is_found_by_a_run_with_its_test_clients_and_replaced_only_where_that_is_said() -> None:
    folder = data(test=0.2).write("mine")
    assert find_dataset("mine") == folder
    with raises(DatasetError, "data.exists", "mine", "replace=True"):
        data(name="two").write("mine")
    assert open_dataset(folder).manifest.name == "mine"
    assert open_dataset(find_dataset("mine/test")).manifest.name == "mine-test"
    assert open_dataset(data(name="two").write("mine", replace=True)).manifest.name == "two"


def test_a_full_disk_leaves_the_dataset_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = data(name="one").write("mine")
    before = {one: one.read_bytes() for one in folder.iterdir()}

    def cut(*_: Any) -> None:
        raise OSError("300 requested and 12 written")  # in NumPy's words

    monkeypatch.setattr(np, "save", cut)
    with raises(DiskError, "disk.full", folder):
        data(name="two").write("mine", replace=True)
    assert {one: one.read_bytes() for one in folder.iterdir()} == before
    assert [one.name for one in folder.parent.iterdir()] == ["mine"]


def test_a_path_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (tmp_path / "a", str(tmp_path / "b"), Path("c"), "./d"):
        folder = data(name="own").write(given)
        assert folder.parent == tmp_path
        assert open_dataset(folder).manifest.name == "own"
    with raises(DatasetError, "data.name", "''"):
        folder_of("")


@pytest.mark.parametrize("name", ["hospital", "last"])
def test_a_name_that_a_run_takes_for_something_else_is_refused(name: str, tmp_path: Path) -> None:
    """``umbel run hospital`` would run the paper's noise and rounds on the user's table."""
    with raises(DatasetError, "data.name", repr(name)):
        data().write(name)
    assert data().write(tmp_path / name).name == name
