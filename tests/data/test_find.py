"""A dataset is found by its name: in the user's folder, then among those that travel with the app."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.datasets import FEATURES, MANIFEST, OFFSETS, TARGETS
from tests.helpers.errors import raises
from umbel.data import BUNDLED, find_dataset, read_manifest, write_dataset
from umbel.protocol.errors import DatasetError


def test_manifest_of_a_folder_is_read_without_its_arrays(folder: Path) -> None:
    for array in folder.glob("*.npy"):
        array.unlink()
    assert read_manifest(folder) == MANIFEST


def test_a_name_is_found_in_the_home_before_the_bundle(umbel_home: Path) -> None:
    assert find_dataset("synthetic") == BUNDLED / "synthetic.json"
    mine = umbel_home / "data" / "synthetic"
    write_dataset(mine, MANIFEST, FEATURES, TARGETS, OFFSETS)
    assert find_dataset("synthetic") == mine


def test_a_path_is_taken_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find_dataset(str(folder)) == folder
    assert find_dataset("~/small") == folder


def test_the_working_directory_plays_no_part(umbel_home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with raises(DatasetError, "data.unknown", "'small'"):
        find_dataset("small")


def test_an_unknown_name_lists_where_it_was_looked_for(umbel_home: Path) -> None:
    places = umbel_home / "data" / "lilies", BUNDLED / "lilies.json"
    with raises(DatasetError, "data.unknown", *places, "umbel data import"):
        find_dataset("lilies")


def test_no_name_says_how_to_give_one() -> None:
    with raises(DatasetError, "data.none", '"NAME"'):
        find_dataset("")
