"""A dataset on disk: a folder of memory-mapped arrays, for data of any size, or LEAF's JSON, for small data."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.data.data import Dataset, Manifest, as_array, check, check_printable, offsets_of
from umbel.protocol.errors import DatasetError
from umbel.protocol.home import make_folder, special_file, sync, told_if_full, write_atomically


def read_json(file: Path) -> Any:
    if file.exists() and not file.is_file():
        raise DatasetError(f"{file} is not a file; put one there", code="data.unreadable")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "a dataset is a LEAF JSON file or a folder with a manifest.json"
        raise DatasetError(f"{file} is missing; {what}", code="data.no-file") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError also for a number with too many digits
        raise DatasetError(f"{file} cannot be read as JSON: {error}", code="data.unreadable") from None


OF_RUN = "dataset.json"
"""File in a run's folder: the manifest that its dataset had at the start."""


def read_manifest_of_run(run: Path) -> Manifest | None:
    """Return the manifest that a run's dataset had; None for real sites.

    Raises
    ------
    DatasetError
        If umbel did not write the file.
    """
    file = run / OF_RUN
    return Manifest.read(read_json(file), file) if file.exists() else None


# --- a folder


def open_folder(folder: Path) -> Dataset:
    """Return the dataset in a folder. If another takes its place meanwhile, it is that one, and no part of the first.

    Errors are those of `umbel.data.find.open_dataset`.
    """
    first = folder.stat()
    manifest = Manifest.read(read_json(folder / "manifest.json"), folder / "manifest.json")
    if strange := special_file(folder):
        raise DatasetError(f"{strange} is not a file; delete it", code="data.unreadable")
    arrays = {}
    for name in ("features", "targets", "offsets"):
        file = folder / f"{name}.npy"
        try:
            # A plain array, since access through NumPy's memmap class takes longer than reading a small cohort's rows.
            arrays[name] = np.lib.format.open_memmap(file, mode="r").view(np.ndarray)
        except FileNotFoundError:
            raise DatasetError(f"{file} is missing; write the dataset again", code="data.no-file") from None
        except Exception as error:  # NumPy raises many kinds for a bad header
            raise DatasetError(f"{file} is not a plain .npy array: {error}", code="data.unreadable") from None
    names = _read_names(folder)
    if not os.path.samestat(first, folder.stat()):
        return open_folder(folder)
    return Dataset(manifest, arrays["features"], arrays["targets"], arrays["offsets"], names)


def _read_names(folder: Path) -> list[str]:
    file = folder / "clients.json"
    if not file.exists():
        return []
    names = read_json(file)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DatasetError(f"{file} is not a list of clients' names; write the dataset again", code="data.names")
    check_printable(names, file)
    return names


def _foreign(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir()) and not (folder / "manifest.json").exists()


def check_out(folder: Path) -> None:
    """Raise early, before the work, if its result could not be written."""
    if _foreign(folder):
        raise DatasetError(f"{folder} exists and is not a dataset; give another folder", code="data.exists")
    # A rename puts the folder in place, so the folder above it must be writable.
    above = next(parent for parent in folder.parents if parent.exists())
    if (folder.exists() and not folder.is_dir()) or not above.is_dir() or not os.access(above, os.W_OK):
        raise DatasetError(f"{folder} cannot be written; give a writable folder", code="data.not-writable")


def write_dataset(
    folder: Path | str,
    manifest: Manifest,
    features: NDArray[Any],
    targets: NDArray[Any],
    offsets: NDArray[np.int64],
    names: Sequence[str] = (),
    test: Dataset | None = None,
) -> None:
    """Check a dataset and write it as a folder, completely or not at all.

    It replaces a dataset that is already there; for any other non-empty folder it raises. If the process is killed
    while it does so, the old and the new one may both be in a folder beside it, whose name begins with a dot.

    Parameters
    ----------
    folder : Path or str
    manifest, features, targets, offsets, names
        As in `Dataset`.
    test : Dataset, optional
        Clients outside all runs, written to the subfolder ``test``.

    Raises
    ------
    DatasetError
        If the data do not fit the manifest, or the folder exists and is not a dataset.
    DiskError
        If the disk is full. An existing dataset then stays.
    """
    folder = Path(folder).expanduser()
    x, y = as_array(features, "features"), as_array(targets, "targets")
    whole = Dataset(manifest, x, y, as_array(offsets, "offsets"), names)
    parts = {".": whole} if test is None else {".": whole, "test": test}
    for part, dataset in parts.items():
        check(dataset, folder / part)
        # As on reading, but before the data are in place.
        check_printable([dataset.manifest.entries(), list(dataset.names)], folder / part)
    if _foreign(folder) or (folder.exists() and not folder.is_dir()):
        raise DatasetError(f"{folder} exists and is not a dataset; give another folder", code="data.exists")
    make_folder(folder.parent)
    with told_if_full(folder), tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new = Path(scratch) / "new"
        for part, dataset in parts.items():
            _save(new / part, dataset)
        _put(new, folder, Path(scratch) / "old")


def _put(new: Path, folder: Path, old: Path) -> None:
    """Rename `new` to `folder`. The earlier content goes to `old`, and comes back if that fails."""
    try:
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    sync(folder.parent)


def _save(folder: Path, dataset: Dataset) -> None:
    """Write the files of a dataset, which are for their owner alone at any umask: they hold rows of persons."""
    folder.mkdir(mode=0o700)
    np.save(folder / "features.npy", dataset.features)
    np.save(folder / "targets.npy", dataset.targets)
    np.save(folder / "offsets.npy", dataset.offsets.astype(np.int64))
    texts = {"manifest": json.dumps(dataset.manifest.entries(), indent=2)}
    if len(dataset.names):
        texts["clients"] = json.dumps(list(dataset.names), ensure_ascii=False)
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    # Before the folder gets its name, and the old one goes.
    for path in folder.iterdir():
        path.chmod(0o600)
        sync(path)
    sync(folder)


# --- LEAF's JSON, for small datasets


def open_leaf(file: Path) -> Dataset:
    return _parse_leaf(read_json(file), file)


def write_leaf(path: Path, manifest: Manifest, clients: Mapping[str, tuple[Any, Any]]) -> None:
    """Write a dataset as LEAF JSON, with umbel's manifest beside LEAF's three keys.

    `clients` holds x and y of each user, as nested lists or arrays; training clients come first.
    """
    data = {user: {"x": _listed(x), "y": _listed(y)} for user, (x, y) in clients.items()}
    counts = [len(rows["y"]) for rows in data.values()]
    document = {"manifest": manifest.entries(), "users": list(data), "num_samples": counts, "user_data": data}
    check(_parse_leaf(document, path), path)
    make_folder(path.parent)
    write_atomically(path, (json.dumps(document, separators=(",", ":")) + "\n").encode(), private=True)


def _listed(rows: Any) -> list[Any]:
    """Return rows as nested lists; 32-bit numbers have the fewest digits that tell them apart."""
    array = np.asarray(rows)
    listed: list[Any] = (array.astype(str).astype(np.float64) if array.dtype == np.float32 else array).tolist()
    return listed


def _parse_leaf(raw: Any, file: Path) -> Dataset:
    """Return the dataset in a decoded LEAF document; `file` is named in errors."""
    if not isinstance(raw, dict) or not {"users", "num_samples", "user_data"} <= set(raw):
        raise DatasetError(f"{file}: LEAF JSON needs the keys users, num_samples and user_data", code="data.leaf")
    users, counts, data = raw["users"], raw["num_samples"], raw["user_data"]
    lists = isinstance(users, list) and isinstance(counts, list) and isinstance(data, dict)
    if not lists or len(counts) != len(users):
        wrong = "users and num_samples must be lists of one length, user_data an object"
        raise DatasetError(f"{file}: {wrong}", code="data.leaf")
    if strange := [user for user in users if not isinstance(user, str)]:
        raise DatasetError(f"{file}: the names in users must be text, got {strange[0]!r}", code="data.leaf")
    if len(set(users)) != len(users):
        raise DatasetError(f"{file}: users names a client twice; give each another name", code="data.twice")
    if "manifest" in raw:
        manifest = Manifest.read(raw["manifest"], file)
    elif users:
        # LEAF keeps training and test users in separate files: here all users train.
        manifest = Manifest(name=file.stem, clients=len(users), split={"train": len(users), "validation": 0})
    else:
        raise DatasetError(f"{file}: the dataset has no clients", code="data.no-rows")
    if len(users) != manifest.clients:
        raise DatasetError(f"{file}: {len(users)} users, but {manifest.clients} clients", code="data.lengths")
    clients = [_rows(data, user, count, file) for user, count in zip(users, counts, strict=True)]
    parts = []
    for name, rows in zip("xy", zip(*clients, strict=True), strict=True):
        if len(shapes := {one.shape[1:] for one in rows}) > 1:
            told = sorted(map(str, shapes))
            raise DatasetError(f"{file}: clients differ in the shape of a row of {name}: {told}", code="data.shape")
        parts.append(np.concatenate(rows))
    features, targets = parts
    with np.errstate(over="ignore"):
        features = features if manifest.tokens else features.astype(np.float32)
    # One client's targets may happen to be integers: they are classes only if all clients' targets are integers.
    targets = targets.astype(np.float32) if targets.dtype.kind == "f" else targets
    return Dataset(manifest, features, targets, offsets_of(counts), users)


def _rows(data: dict[str, Any], user: str, count: Any, file: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a user's x and y, checked."""
    source = f"{file}: client {user!r}"
    try:
        x, y = np.asarray(data[user]["x"]), np.asarray(data[user]["y"])
        lengths = len(x), len(y)
    except (KeyError, TypeError, ValueError):
        raise DatasetError(f"{source} needs rectangular lists x and y in user_data", code="data.leaf") from None
    if lengths != (count, count):
        found = f"{lengths[0]} x, {lengths[1]} y and num_samples {count}"
        raise DatasetError(f"{source} has {found}; make them equal", code="data.lengths")
    if count == 0:
        raise DatasetError(f"{source} has no rows; leave it out", code="data.empty-client")
    if x.dtype.kind not in "biuf" or y.dtype.kind not in "biuf":
        raise DatasetError(f"{source} holds values that are not numbers", code="data.not-numbers")
    with np.errstate(over="ignore"):  # infinite values are found and named with the rest
        return x, y if y.dtype.kind in "biu" else y.astype(np.float32)
