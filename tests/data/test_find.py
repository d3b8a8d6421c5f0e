"""A dataset is found by its name: in the user's folder, then among those that travel with the app."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbel.data.data
import umbel.data.find
from tests.helpers.datasets import FEATURES, MANIFEST, OFFSETS, TARGETS
from tests.helpers.errors import raises
from tests.helpers.sources import ROOT
from umbel.data import BUNDLED, Dataset, find_dataset, find_typed, open_dataset, read_manifest, write_dataset
from umbel.protocol.errors import DatasetError


def test_a_name_is_found_in_the_home_before_the_bundle(umbel_home: Path) -> None:
    for name in ("synthetic", "hospital", "hospital-services"):
        assert find_dataset(name) == BUNDLED / f"{name}.json"
        mine = umbel_home / "data" / name
        write_dataset(mine, MANIFEST, FEATURES, TARGETS, OFFSETS)
        assert find_dataset(name) == mine


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("", ("data.none", '"NAME"')),
        ("lilies", ("data.unknown", "data/lilies", BUNDLED / "lilies.json", "umbel data import")),
        ("small", ("data.unknown", "'small'")),  # the working directory plays no part
        ("femnist", ("data.unknown", "umbel data make femnist --help")),
        ("qmnist-2", ("data.unknown", "umbel data make qmnist --help")),
        ("my-femnist", ("data.unknown", "umbel data show")),
    ],
)
def test_a_name_of_nothing_is_told_with_what_makes_it(
    name: str, parts: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    with raises(DatasetError, *parts):
        find_dataset(name)


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
    for array in folder.glob("*.npy"):
        array.unlink()
    assert read_manifest(folder) == MANIFEST, "without its arrays"


def test_a_dataset_of_another_user_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site's data may belong to another user than its process, which then cannot read them."""

    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)
    monkeypatch.setattr(umbel.data.find, "open_folder", denied)
    with raises(DatasetError, "data.unreadable"):
        open_dataset(folder)
