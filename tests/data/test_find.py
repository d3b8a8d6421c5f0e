"""A dataset is found by its name: in the user's folder, then among those that travel with the app."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import umbel.data.data
import umbel.data.find
from tests.helpers.datasets import FEATURES, MANIFEST, OFFSETS, TARGETS
from tests.helpers.errors import raises
from tests.helpers.sources import ROOT
from umbel.data import BUNDLED, Dataset, find_dataset, find_typed, open_dataset, read_manifest, write_dataset
from umbel.protocol.errors import DatasetError


def test_manifest_of_a_folder_is_read_without_its_arrays(folder: Path) -> None:
    for array in folder.glob("*.npy"):
        array.unlink()
    assert read_manifest(folder) == MANIFEST


def test_a_name_is_found_in_the_home_before_the_bundle(umbel_home: Path) -> None:
    for name in ("synthetic", "hospital", "hospital-services"):
        assert find_dataset(name) == BUNDLED / f"{name}.json"
        mine = umbel_home / "data" / name
        write_dataset(mine, MANIFEST, FEATURES, TARGETS, OFFSETS)
        assert find_dataset(name) == mine


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("femnist", "femnist"),
        ("qmnist-2", "qmnist"),
        ("movielens", "movielens"),
    ],
)
def test_one_that_a_recipe_makes_is_told_with_the_recipe(name: str, recipe: str, umbel_home: Path) -> None:
    with raises(DatasetError, "data.unknown", f"umbel data make {recipe} --help"):
        find_dataset(name)
    with raises(DatasetError, "data.unknown", "umbel data show"):
        find_dataset(f"my-{name}")


def test_the_page_tells_what_ships() -> None:
    page = (ROOT / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
    part = page.partition("## Datasets that come with umbel")[2].partition("## ")[0]
    told = [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if line.startswith("| `")]
    there = {
        f"`{file.stem}`": (open_dataset(file), f"{file.stat().st_size / 1000:.0f} kB")
        for file in BUNDLED.glob("*.json")
    }
    assert {name: (clients.split()[0], rows, size) for name, clients, rows, _, _, size in told} == {
        name: (f"{data.manifest.clients:,}", f"{len(data.targets):,}", size) for name, (data, size) in there.items()
    }


def test_a_path_is_taken_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find_dataset(str(folder)) == folder
    assert find_dataset("~/small") == folder


def test_another_folder_does_not_hide_a_dataset_of_its_name(
    umbel_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (umbel_home / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    Path("synthetic").mkdir()
    assert find_typed("synthetic") == BUNDLED / "synthetic.json"
    Path("synthetic/manifest.json").touch()
    assert find_typed("synthetic") == tmp_path / "synthetic"
    Path("mine").mkdir()
    assert find_typed("mine") == tmp_path / "mine", "whoever opens it is told what it lacks"


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


def test_rows_are_checked_once_and_again_after_each_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Path] = []

    def check(dataset: Dataset, path: Path) -> None:
        checked.append(path)
        umbel.data.data.check(dataset, path)

    def opened() -> int:
        """Open the dataset twice; return how often it was checked."""
        checked.clear()
        for _ in range(2):
            assert open_dataset(folder).manifest == MANIFEST
        return len(checked)

    monkeypatch.setattr(umbel.data.find, "check", check)
    assert opened() == 2, "files that have just been written may change again within the resolution of their times"
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    assert opened() == 1
    assert opened() == 0
    np.save(folder / "features.npy", np.full_like(FEATURES, np.nan))
    with raises(DatasetError, "data.not-finite"):
        open_dataset(folder)
    np.save(folder.parent / "other.npy", FEATURES)
    os.utime(folder.parent / "other.npy", (0, 0))
    os.replace(folder.parent / "other.npy", folder / "features.npy")
    assert opened() == 1, "of the same size and time, and yet another file"


def test_a_dataset_of_another_user_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site's data may belong to another user than its process, which then cannot read them."""

    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)
    monkeypatch.setattr(umbel.data.find, "open_folder", denied)
    with raises(DatasetError, "data.unreadable"):
        open_dataset(folder)
