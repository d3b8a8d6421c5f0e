"""LEAF's JSON, for small datasets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.data.data import Dataset, check, offsets_of
from umbel.data.manifest import Manifest
from umbel.protocol.errors import DatasetError
from umbel.protocol.home import write_atomically


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DatasetError(
            f"{file} is missing; a dataset is a LEAF JSON file or a folder with a manifest.json", code="data.no-file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # a number may have too many digits as well
        raise DatasetError(f"{file} cannot be read as JSON: {error}", code="data.unreadable") from None


def open_leaf(file: Path) -> Dataset:
    return _parse_leaf(read_json(file), file)


def write_leaf(path: Path, manifest: Manifest, clients: Mapping[str, tuple[Any, Any]]) -> None:
    """Write a dataset as LEAF JSON, with umbel's manifest beside LEAF's three keys.

    `clients` holds x and y of each user, as nested lists or arrays; training clients first.
    """
    data = {user: {"x": np.asarray(x).tolist(), "y": np.asarray(y).tolist()} for user, (x, y) in clients.items()}
    counts = [len(rows["y"]) for rows in data.values()]
    document = {"manifest": manifest.entries(), "users": list(data), "num_samples": counts, "user_data": data}
    check(_parse_leaf(document, path), path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(document, separators=(",", ":")) + "\n").encode())


def _parse_leaf(raw: Any, file: Path) -> Dataset:
    """Return the dataset of a decoded LEAF document; `file` is named in errors."""
    if not isinstance(raw, dict) or not {"users", "num_samples", "user_data"} <= set(raw):
        raise DatasetError(f"{file}: LEAF JSON needs the keys users, num_samples and user_data", code="data.leaf")
    users, counts, data = raw["users"], raw["num_samples"], raw["user_data"]
    lists = isinstance(users, list) and isinstance(counts, list) and isinstance(data, dict)
    if not lists or len(counts) != len(users):
        raise DatasetError(
            f"{file}: users and num_samples must be lists of one length, user_data an object", code="data.leaf"
        )
    if strange := [user for user in users if not isinstance(user, str)]:
        raise DatasetError(f"{file}: the names in users must be text, got {strange[0]!r}", code="data.leaf")
    if len(set(users)) != len(users):
        raise DatasetError(f"{file}: users names a client twice; give each another name", code="data.twice")
    if "manifest" in raw:
        manifest = Manifest.read(raw["manifest"], file)
    elif users:
        # LEAF keeps training and test users in separate files: all of these train.
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
    # One client's targets may happen to be whole numbers: they are classes only if those of all clients are.
    targets = targets.astype(np.float32) if targets.dtype.kind == "f" else targets
    return Dataset(manifest, features, targets, offsets_of(counts), users)


def _rows(data: dict[str, Any], user: str, count: Any, file: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a user's x and y, checked."""
    try:
        x, y = np.asarray(data[user]["x"]), np.asarray(data[user]["y"])
        lengths = len(x), len(y)
    except (KeyError, TypeError, ValueError):
        raise DatasetError(
            f"{file}: client {user!r} needs rectangular lists x and y in user_data", code="data.leaf"
        ) from None
    if lengths != (count, count):
        raise DatasetError(
            f"{file}: client {user!r} has {lengths[0]} x, {lengths[1]} y and num_samples {count}; make them equal",
            code="data.lengths",
        )
    if count == 0:
        raise DatasetError(f"{file}: client {user!r} has no rows; leave it out", code="data.empty-client")
    if x.dtype.kind not in "biuf" or y.dtype.kind not in "biuf":
        raise DatasetError(f"{file}: client {user!r} holds values that are not numbers", code="data.not-numbers")
    with np.errstate(over="ignore"):  # what becomes infinite is found, and named, with the rest
        return x, y if y.dtype.kind in "biu" else y.astype(np.float32)
