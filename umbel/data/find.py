"""Datasets by name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from umbel.data.data import Dataset, check
from umbel.data.folder import open_folder
from umbel.data.leaf import open_leaf, read_json
from umbel.data.manifest import Manifest
from umbel.protocol.errors import DatasetError
from umbel.protocol.home import umbel_home

BUNDLED = Path(__file__).resolve().parent.parent / "datasets"


def find_dataset(name: str) -> Path:
    """Return the path of the dataset called `name`.

    An absolute path (or one that starts with ``~``) stays the same. A name is looked up in
    ``$UMBEL_HOME/data`` and then among the datasets that travel with the app. The working
    directory plays no part: in a Flower process it is not the user's.
    """
    if not name:
        raise DatasetError('no dataset given; set dataset = "NAME", or an absolute path', code="data.none")
    candidates = _candidates(name, os.environ.get("UMBEL_HOME"))
    for candidate in candidates:
        if os.path.exists(candidate):
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    raise DatasetError(
        f"no dataset {name!r}: looked for {looked}; umbel data list shows those there are, and umbel data import "
        "or a recipe in datasets/ makes one",
        code="data.unknown",
    )


def find_typed(name: str | Path) -> Path:
    """Return what `find_dataset` does, for a name or a path that a user gives where the user is."""
    path = Path(name).expanduser()
    return path.absolute() if path.exists() else find_dataset(str(name))


@lru_cache(maxsize=16)
def _candidates(name: str, _home: str | None) -> Sequence[Path]:
    """Return where a dataset may be; `_home` is what the answer hangs on."""
    path = Path(name).expanduser()
    return [path] if path.is_absolute() else [umbel_home() / "data" / name, BUNDLED / f"{name}.json"]


def digest_of(path: Path) -> str:
    """Return the beginning of the SHA-256 of a dataset's files."""
    digest = hashlib.sha256()
    for file in sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]


def digest_of_rows(path: Path) -> str:
    """Return the digest of the rows of the dataset at `path`, which are not checked."""
    return (open_folder(path) if path.is_dir() else open_leaf(path)).digest


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the dataset at `path`, and no data where there is a folder."""
    if path.is_dir():
        file = path / "manifest.json"
        return Manifest.read(read_json(file), file)
    return open_leaf(path).manifest


def open_dataset(path: Path, part: bool = False) -> Dataset:
    """Open and check the dataset at `path`, a folder or a LEAF JSON file.

    Parameters
    ----------
    path : Path
    part : bool
        Whether a part of one will do (see `umbel.data.shards`).

    Raises
    ------
    DatasetError
        When a file is missing or unreadable, shapes or offsets do not fit, a client has no
        rows, or a number is not finite. The text names the file, the client and the fix.
    """
    dataset = open_folder(path) if path.is_dir() else open_leaf(path)
    if dataset.manifest.part and not part:
        raise DatasetError(
            f"{path} holds the rows of part {dataset.manifest.part} of its clients alone, for a Ray cluster whose "
            "machines hold the others; this needs the whole dataset",
            code="data.part",
        )
    check(dataset, path)
    return dataset
