"""Small made-up datasets, on disk and in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from umbel.data import Dataset, Manifest, offsets_of, write_dataset

# Three clients with 2, 1 and 3 rows; two of them train.
MANIFEST = Manifest(name="small", clients=3, split={"train": 2, "validation": 1})
FEATURES = np.arange(12, dtype=np.float32).reshape(6, 2)
TARGETS = np.arange(6, dtype=np.float32)
OFFSETS = np.array([0, 2, 3, 6])
LEAF: dict[str, Any] = {
    "users": ["a", "b"],
    "num_samples": [1, 2],
    "user_data": {"a": {"x": [[1, 2]], "y": [0]}, "b": {"x": [[3, 4], [5, 6]], "y": [1, 0]}},
}


class Numbers(list[Any]):
    """A register in memory."""

    def read(self) -> list[Any]:
        return list(self)

    def extend(self, known: Any, new: Any) -> None:
        assert self == known
        self[:] = [*known, *new]


def manifest(train: int, validation: int = 0, **entries: Any) -> Manifest:
    """Return a manifest of so many clients."""
    own = {"name": "own", "clients": train + validation, "split": {"train": train, "validation": validation}}
    return Manifest(**(own | entries))


def save_leaf(path: Path, **changes: Any) -> Path:
    """Write `LEAF` with some keys changed."""
    path.write_text(json.dumps(LEAF | changes))
    return path


def save_manifest(folder: Path, **changes: Any) -> None:
    """Change entries of the manifest in a folder; an entry of None is taken out."""
    entries = json.loads((folder / "manifest.json").read_text()) | changes
    kept = {key: value for key, value in entries.items() if value is not None}
    (folder / "manifest.json").write_text(json.dumps(kept))


def save_plane(path: Path, train: int, validation: int = 0, seconds: int = 0, **entries: Any) -> Path:
    """Write clients of the linear model; client i has i + 1 rows of the plane y = 5 x0 + 6 x1.

    `seconds` sets the time of writing, and `entries` go into the manifest.
    """
    lengths = range(1, train + validation + 1)
    features = np.random.default_rng(0).uniform(-1, 1, (sum(lengths), 2)).astype(np.float32)
    targets = features @ np.array([5, 6], np.float32)
    write_dataset(
        path, manifest(train, validation, **{"model": "linear"} | entries), features, targets, offsets_of(lengths)
    )
    os.utime(path / "manifest.json", (seconds, seconds))
    return path


@st.composite
def datasets(draw: st.DrawFn, image: bool) -> Dataset:
    """Ragged clients: bytes of images with classes, or numbers with numbers."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    train = draw(st.integers(0, len(lengths)))
    rows = sum(lengths)
    if image:
        features = draw(hnp.arrays(np.uint8, (rows, 2, 2)))
        targets = draw(hnp.arrays(np.int64, rows, elements=st.integers(0, 61)))
    else:
        number = st.floats(-1e6, 1e6, width=32)
        features = draw(hnp.arrays(np.float32, (rows, draw(st.integers(1, 3))), elements=number))
        shape = draw(st.sampled_from([(rows,), (rows, 2)]))
        targets = draw(hnp.arrays(np.float32, shape, elements=number))
    drawn = manifest(
        train,
        len(lengths) - train,
        name="drawn",
        model=draw(st.sampled_from(["", "linear"])),
        local=draw(st.sampled_from(["", "head.*"])),
        units={"target": {"name": "payment", "unit": "dollars", "scale": 10.0}},
        truth=[[1.5, -2.0]],
        groups=draw(st.one_of(st.just([]), st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))),
        provenance=draw(st.text(st.characters(exclude_categories=["C", "Z"]), max_size=5)),
    )
    return Dataset(drawn, features, targets, offsets_of(lengths))


def assert_same(read: Dataset, written: Dataset) -> None:
    """Check that two datasets have the same manifest and the same rows of each client."""
    assert read.manifest == written.manifest
    np.testing.assert_array_equal(read.offsets, written.offsets)
    for i in range(written.manifest.clients):
        for ours, theirs in zip(read.client(i), written.client(i), strict=True):
            np.testing.assert_array_equal(ours, theirs)
