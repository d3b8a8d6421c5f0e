"""A folder of arrays is written whole or not at all, mapped into memory, and read back."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.datasets import FEATURES, MANIFEST, OFFSETS, TARGETS, assert_same, datasets, manifest
from tests.helpers.errors import raises
from tests.helpers.examples import examples
from umbel.data import Dataset, check_out, open_dataset, read_manifest, write_dataset
from umbel.protocol.errors import DatasetError, DiskError


@settings(max_examples=examples(10))
@given(st.booleans().flatmap(datasets))
def test_folder_gives_back_what_was_written(dataset: Dataset) -> None:
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "drawn"
        write_dataset(path, dataset.manifest, dataset.features, dataset.targets, dataset.offsets)
        read = open_dataset(path)
        assert_same(read, dataset)
        assert (read.features.dtype, read.targets.dtype) == (dataset.features.dtype, dataset.targets.dtype)
        assert read_manifest(path) == dataset.manifest


def test_folder_is_memory_mapped_and_clients_are_views(folder: Path) -> None:
    dataset = open_dataset(folder)
    assert isinstance(dataset.features.base, np.memmap)
    assert isinstance(dataset.targets.base, np.memmap)
    assert not dataset.features.flags.writeable
    features, targets = dataset.client(1)
    assert np.shares_memory(features, dataset.features)
    assert np.shares_memory(targets, dataset.targets)


def test_a_dataset_that_fails_its_check_leaves_the_old_one(folder: Path) -> None:
    with raises(DatasetError, "data.not-finite", "client 0", "row 1"):
        write_dataset(folder, MANIFEST, np.where(FEATURES == 3, np.nan, FEATURES), TARGETS, OFFSETS)
    np.testing.assert_array_equal(open_dataset(folder).features, FEATURES)
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_dataset_that_cannot_get_its_name_leaves_the_old_one(
    fault: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise fault
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises((DiskError, KeyboardInterrupt)):
        write_dataset(folder, manifest(1, 0), FEATURES + 1, TARGETS, np.array([0, 6]))
    np.testing.assert_array_equal(open_dataset(folder).features, FEATURES)
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("mask", [0, 0o077])
def test_a_dataset_is_its_owners_alone_at_any_umask_and_in_any_home(umbel_home: Path, mask: int) -> None:
    umbel_home.mkdir(mode=0o755, exist_ok=True)
    umbel_home.chmod(0o755)
    os.umask(mask)
    rows = np.ones((2, 3), np.float32), np.ones(2, np.float32), np.array([0, 1, 2])
    folder = umbel_home / "data" / "stays"
    write_dataset(folder, manifest(1, 1), *rows, ["a", "b"], Dataset(manifest(1, 1), *rows))
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert {name for name, mode in modes.items() if mode == 0o700} == {"stays", "test"}
    assert {name for name, mode in modes.items() if mode == 0o600} == {
        "features.npy", "targets.npy", "offsets.npy", "manifest.json", "clients.json",
    }  # fmt: skip
    assert len(set(modes.values())) == 2


def test_a_dataset_is_on_the_disk_before_it_takes_the_place_of_the_old_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power cut could cost both."""
    synced, fsync = [], os.fsync

    def look(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        assert open_dataset(folder).features.shape == (FEATURES.shape if synced[-1] != folder.parent.name else (2, 3))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    write_dataset(folder, manifest(1, 0), np.ones((2, 3), np.float32), np.ones(2, np.float32), np.array([0, 2]))
    assert {*synced[:-2]} == {file.name for file in folder.iterdir()}
    assert synced[-2:] == ["new", folder.parent.name]
    assert len(open_dataset(folder).client(0)[0]) == 2
    assert list(folder.parent.iterdir()) == [folder], "no scratch folder stays behind"


def test_a_dataset_that_is_replaced_while_it_is_opened_is_not_mixed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the one with targets of the other would have the right shapes."""
    opened, open_array = [], np.lib.format.open_memmap

    def look(file: Path, **how: Any) -> Any:
        opened.append(file.stem)
        if opened == ["features", "targets"]:
            write_dataset(folder, MANIFEST, FEATURES + 1, TARGETS + 1, OFFSETS)
        return open_array(file, **how)

    monkeypatch.setattr(np.lib.format, "open_memmap", look)
    found = open_dataset(folder)
    np.testing.assert_array_equal(found.features, FEATURES + 1)
    np.testing.assert_array_equal(found.targets, TARGETS + 1)


@pytest.mark.parametrize(
    ("entries", "names"),
    [({"name": "a\x1b[2J"}, ()), ({}, [f"{client}\x1b[2J" for client in range(MANIFEST.clients)])],
)
def test_what_no_terminal_can_print_is_refused_before_it_is_written(
    entries: dict[str, str], names: list[str], tmp_path: Path
) -> None:
    with raises(DatasetError, "data.unprintable", "x1b"):
        write_dataset(tmp_path / "data", MANIFEST.model_copy(update=entries), FEATURES, TARGETS, OFFSETS, names)
    assert not (tmp_path / "data").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with raises(DatasetError, "data.exists", path):
            write_dataset(path, MANIFEST, FEATURES, TARGETS, OFFSETS)
    # It is known before the work.
    with raises(DatasetError, "data.exists", tmp_path):
        check_out(tmp_path)
    for path in (tmp_path / "thesis.tex", tmp_path / "thesis.tex" / "below"):
        with raises(DatasetError, "data.not-writable", path):
            check_out(path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("thesis.tex", "years of work")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("targets.npy", text) for text in ("1 2 3 4 5 6", "", "PK\x03\x04 of an .npz", "pickled", "endless")),
        *(("manifest.json", text) for text in ("{", "\xff")),
        *((f"{array}.npy", None) for array in ("features", "targets", "offsets")),
    ],
)
def test_a_file_that_is_missing_or_of_another_format_is_named_and_no_pickle_loaded(
    folder: Path, name: str, content: str | None
) -> None:
    file = folder / name
    if content is None:
        file.unlink()
    elif content == "pickled":
        np.save(file, np.array([None] * 6, dtype=object), allow_pickle=True)
    else:
        whole = file.read_bytes()
        file.write_bytes(whole.replace(b"}", b" ", 1) if content == "endless" else content.encode("latin-1"))
    with raises(DatasetError, "data.no-file" if content is None else "data.unreadable", file):
        open_dataset(folder)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 127), st.integers(0, 255)), max_size=4), st.integers(0, 200))
def test_a_damaged_header_is_named_or_does_no_harm(folder: Path, changes: list[tuple[int, int]], length: int) -> None:
    """Whatever numpy makes of it: some bytes are no more than white space."""
    buffer = BytesIO()
    np.save(buffer, FEATURES)
    damaged = bytearray(buffer.getvalue())
    for place, value in changes:
        damaged[place] = value
    (folder / "features.npy").write_bytes(damaged[:length])
    with suppress(DatasetError):
        open_dataset(folder)
