"""A folder of memory-mapped arrays, for datasets of any size."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.data.data import Dataset, check
from umbel.data.leaf import read_json
from umbel.data.manifest import Manifest, check_printable
from umbel.protocol.errors import DatasetError


def open_folder(folder: Path) -> Dataset:
    manifest = Manifest.read(read_json(folder / "manifest.json"), folder / "manifest.json")
    arrays = {}
    for name in ("features", "targets", "offsets"):
        file = folder / f"{name}.npy"
        try:
            # As a plain array: numpy's subclass takes longer over each access than a small cohort's rows.
            arrays[name] = np.lib.format.open_memmap(file, mode="r").view(np.ndarray)
        except FileNotFoundError:
            raise DatasetError(f"{file} is missing; write the dataset again", code="data.no-file") from None
        except Exception as error:  # numpy raises many kinds for a bad header
            raise DatasetError(f"{file} is not a plain .npy array: {error}", code="data.unreadable") from None
    return Dataset(manifest, arrays["features"], arrays["targets"], arrays["offsets"], _read_names(folder))


def _read_names(folder: Path) -> list[str]:
    file = folder / "clients.json"
    if not file.exists():
        return []
    names = read_json(file)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DatasetError(f"{file} is no list of clients' names; write the dataset again", code="data.names")
    check_printable(names, file)
    return names


def _foreign(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir()) and not (folder / "manifest.json").exists()


def check_out(folder: Path) -> None:
    """Raise before the work where its result could not be written."""
    if _foreign(folder):
        raise DatasetError(f"{folder} exists and is not a dataset; give another folder with --out", code="data.exists")
    # The folder is put in place by a rename, so it is the one above it that must be writable.
    above = next(parent for parent in folder.parents if parent.exists())
    if (folder.exists() and not folder.is_dir()) or not above.is_dir() or not os.access(above, os.W_OK):
        raise DatasetError(f"{folder} cannot be written; give a folder that can with --out", code="data.not-writable")


def write_dataset(
    folder: Path | str,
    manifest: Manifest,
    features: NDArray[Any],
    targets: NDArray[Any],
    offsets: NDArray[np.int64],
    names: Sequence[str] = (),
    test: Dataset | None = None,
) -> None:
    """Check a dataset and write it as a folder, whole or not at all.

    Replaces a dataset already there; any other non-empty folder is left alone with an error.

    Parameters
    ----------
    folder : Path or str
    manifest, features, targets, offsets, names
        As in `Dataset`.
    test : Dataset, optional
        Clients that take part in no run, kept in the folder ``test`` within.

    Raises
    ------
    DatasetError
        When the data are not what the manifest says, or the folder is something else.
    """
    folder = Path(folder).expanduser()
    whole = Dataset(manifest, features, targets, np.asarray(offsets), names)
    parts = {".": whole} if test is None else {".": whole, "test": test}
    for part, dataset in parts.items():
        check(dataset, folder / part)
    if _foreign(folder) or (folder.exists() and not folder.is_dir()):
        raise DatasetError(f"{folder} exists and is not a dataset; give another folder", code="data.exists")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        for part, dataset in parts.items():
            _save(new / part, dataset)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)


def _save(folder: Path, dataset: Dataset) -> None:
    folder.mkdir()
    np.save(folder / "features.npy", dataset.features)
    np.save(folder / "targets.npy", dataset.targets)
    np.save(folder / "offsets.npy", dataset.offsets.astype(np.int64))
    texts = {"manifest": json.dumps(dataset.manifest.entries(), indent=2)}
    if len(dataset.names):
        texts["clients"] = json.dumps(list(dataset.names), ensure_ascii=False)
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
