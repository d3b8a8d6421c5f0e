"""The rows of a dataset, and checks against the format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from umbel.data.manifest import Manifest
from umbel.data.schema import repeated
from umbel.protocol.errors import DatasetError

HELD_OUT = 5
"""Every fifth row of a newcomer is held out to score it."""
_SCAN_ROWS = 1 << 16
_LARGEST, _LARGEST_WHOLE = float(np.finfo(np.float32).max), np.iinfo(np.int64).max


@dataclass(frozen=True)
class Dataset:
    """An opened dataset.

    Attributes
    ----------
    manifest : Manifest
    features : ndarray, shape (rows, \\*feature shape)
        Inputs, the rows of a client together; memory-mapped for a folder.
    targets : ndarray, shape (rows,) or (rows, outputs)
        Outputs, integers for classes.
    offsets : ndarray of int64, shape (clients + 1,)
        Client ``i`` owns rows ``offsets[i]`` to ``offsets[i + 1]``.
    names : sequence of str
        The name of each client at its data; empty if unknown. No message holds it.

    Booleans are stored as 0 and 1.
    """

    manifest: Manifest
    features: NDArray[Any]
    targets: NDArray[Any]
    offsets: NDArray[np.int64]
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        for what in ("features", "targets"):
            array = getattr(self, what)
            if isinstance(array, np.ndarray) and array.dtype == bool:
                object.__setattr__(self, what, array.view(np.uint8))
        if isinstance(self.offsets, np.ndarray) and self.offsets.dtype.kind == "u":  # NumPy adds no signed integers
            object.__setattr__(self, "offsets", self.offsets.astype(np.int64))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of rows of each client."""
        return np.diff(self.offsets)

    def client(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the stored features and targets of one client, without a copy."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return self.features[rows], self.targets[rows]


def check(dataset: Dataset, source: Path) -> None:
    """Raise unless shapes, offsets and values follow the format; `source` is named in errors."""
    manifest, offsets = dataset.manifest, dataset.offsets
    features, targets = dataset.features, dataset.targets
    if not isinstance(manifest, Manifest):
        wrong = f"the manifest is of type {type(manifest).__name__}"
        raise DatasetError(f"{source}: {wrong}; make it by umbel.data.Manifest", code="data.manifest")
    for name, array in (("features", features), ("targets", targets), ("offsets", offsets)):
        if not isinstance(array, np.ndarray):
            wrong = f"{name} must be a NumPy array, got {type(array).__name__}"
            raise DatasetError(f"{source}: {wrong}; convert it by numpy.asarray", code="data.not-numbers")
        _refuse_masked(array, f"{source}: {name}")
    if offsets.dtype.kind not in "iu" or offsets.shape != (manifest.clients + 1,):
        wanted, found = f"{manifest.clients + 1} integers (clients + 1)", f"{offsets.dtype} of shape {offsets.shape}"
        raise DatasetError(f"{source}: offsets must be {wanted}, got {found}", code="data.offsets")
    shapes = f"features {features.shape} and targets {targets.shape}"
    if features.ndim < 1 or targets.ndim < 1 or len(features) != len(targets):
        raise DatasetError(f"{source}: {shapes} differ in their number of rows", code="data.lengths")
    if offsets[0] != 0 or offsets[-1] != len(features):
        found = f"{offsets[0]} to {offsets[-1]}"
        raise DatasetError(f"{source}: offsets run from {found}, not 0 to {len(features)} rows", code="data.offsets")
    if len(bad := np.flatnonzero(offsets[1:] <= offsets[:-1])):
        span = f"offsets {offsets[bad[0]]} to {offsets[bad[0] + 1]}"
        raise DatasetError(f"{source}: client {bad[0]} has no rows ({span})", code="data.empty-client")
    if 0 in (*features.shape[1:], *targets.shape[1:]):
        raise DatasetError(f"{source}: rows are empty in {shapes}", code="data.empty-rows")
    if len(dataset.names) not in (0, manifest.clients):
        found = f"{len(dataset.names)} names for {manifest.clients} clients"
        raise DatasetError(f"{source}: {found}; name each or none", code="data.names")
    if no_texts := [name for name in dataset.names if not isinstance(name, str)]:
        wrong = f"the name {no_texts[0]!r} of a client is no text"
        raise DatasetError(f"{source}: {wrong}; convert names by str", code="data.names")
    if twice := repeated(dataset.names):
        raise DatasetError(f"{source}: two clients are called {twice[0]!r}; rename one", code="data.twice")
    for name, array, scale in (("features", features, manifest.feature_scale), ("targets", targets, 1.0)):
        if array.dtype.kind not in "iuf":
            fix = "umbel.from_dataframe numbers categories"
            raise DatasetError(f"{source}: {name} must be numbers, got {array.dtype}; {fix}", code="data.not-numbers")
        if (row := _first_bad_row(array, scale)) is not None:
            place = f"{name} of client {int(np.searchsorted(offsets, row, side='right')) - 1}, row {row}"
            raise DatasetError(f"{source}: {place}, are not finite or too large; repair them", code="data.not-finite")
    if manifest.tokens:
        if features.dtype.kind not in "iu":
            raise DatasetError(f"{source}: tokens must be integers, got {features.dtype}", code="data.tokens")
        for start, part in _parts(features):
            strange = ((part < 0) | (part >= manifest.tokens)).reshape(len(part), -1).any(axis=1)
            if strange.any():
                wrong = f"row {start + int(strange.argmax())} has a token outside 0 to {manifest.tokens - 1}"
                raise DatasetError(f"{source}: {wrong}; set tokens to the vocabulary's size", code="data.tokens")


def as_array(values: ArrayLike, name: str) -> NDArray[Any]:
    """Return values as an array; `DatasetError` for values that are none, or that are masked."""
    _refuse_masked(values, name)
    try:
        return np.asarray(values)
    except Exception as error:  # lists of unequal lengths, or tensors with gradients
        told = " ".join(str(error).split())
        raise DatasetError(f"{name} are no array: {told}", code="data.not-numbers") from None


def _refuse_masked(values: ArrayLike, name: str) -> None:
    if np.ma.is_masked(values):
        text = f"{name} have masked values, which are missing; fill them in, or leave out their rows"
        raise DatasetError(text, code="data.missing-value")


def offsets_of(lengths: Iterable[int]) -> NDArray[np.int64]:
    """Return the offsets of clients with the given numbers of rows."""
    return np.concatenate([[0], np.cumsum(list(lengths), dtype=np.int64)]).astype(np.int64)


def held_out(lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the rows that score a newcomer and that it does not train on, for clients of given lengths.

    These are every fifth row; of a client with fewer than five rows the last.
    """
    position = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    last = np.repeat(np.where(lengths < HELD_OUT, lengths - 1, -1), lengths)
    kept: NDArray[np.bool_] = (position % HELD_OUT == HELD_OUT - 1) | (position == last)
    return kept


def _parts(array: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield a bounded number of rows at a time, with the number of their first row."""
    for start in range(0, len(array), _SCAN_ROWS):
        yield start, array[start : start + _SCAN_ROWS]


def _first_bad_row(array: NDArray[Any], scale: float) -> int | None:
    """Return the first row with a value that a model cannot take: scaled 32-bit numbers, or signed 64-bit classes."""
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        if limits.max <= _LARGEST_WHOLE and max(-limits.min, limits.max) * abs(scale) <= _LARGEST:
            return None
    for start, part in _parts(array):
        with np.errstate(over="ignore"):
            sound: NDArray[np.bool_] = np.isfinite(part.astype(np.float32, copy=False) * np.float32(scale))
        if array.dtype.kind == "u":
            sound &= part <= _LARGEST_WHOLE
        if not sound.all():
            rows = sound.reshape(len(sound), -1).all(axis=1)
            return start + int(rows.argmin())
    return None
