"""The rows of a federation, and the checks that they are what the format says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.manifest import Manifest
from protocol.errors import FederationError

_SCAN_ROWS = 1 << 16


@dataclass(frozen=True)
class Federation:
    """An opened federation.

    Attributes
    ----------
    manifest : Manifest
        What the data are.
    features : ndarray, shape (rows, \\*feature shape)
        Inputs, the rows of a client together; memory-mapped for a folder.
    targets : ndarray, shape (rows,) or (rows, outputs)
        Outputs, integers for classes.
    offsets : ndarray of int64, shape (clients + 1,)
        Client ``i`` owns rows ``offsets[i]`` to ``offsets[i + 1]``.
    """

    manifest: Manifest
    features: NDArray[Any]
    targets: NDArray[Any]
    offsets: NDArray[np.int64]

    def client(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the stored features and targets of one client, without a copy."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return self.features[rows], self.targets[rows]


def check(federation: Federation, source: Path) -> None:
    """Raise unless shapes, offsets and values are what the format says; `source` is named in errors."""
    manifest, offsets = federation.manifest, federation.offsets
    features, targets = federation.features, federation.targets
    if offsets.dtype.kind not in "iu" or offsets.shape != (manifest.clients + 1,):
        raise FederationError(
            f"{source}: offsets must be {manifest.clients + 1} whole numbers (clients + 1), "
            f"got {offsets.dtype} of shape {offsets.shape}"
        )
    if features.ndim < 1 or targets.ndim < 1 or len(features) != len(targets):
        raise FederationError(
            f"{source}: features {features.shape} and targets {targets.shape} must have the same number of rows"
        )
    if offsets[0] != 0 or offsets[-1] != len(features):
        raise FederationError(
            f"{source}: offsets must run from 0 to {len(features)} rows, got {offsets[0]} to {offsets[-1]}"
        )
    if len(bad := np.flatnonzero(offsets[1:] <= offsets[:-1])):
        raise FederationError(
            f"{source}: client {bad[0]} has no rows (offsets {offsets[bad[0]]} to {offsets[bad[0] + 1]}); leave it out"
        )
    for name, array in (("features", features), ("targets", targets)):
        if array.dtype.kind not in "iuf":
            raise FederationError(f"{source}: {name} must be numbers, got {array.dtype}")
        if array.dtype.kind == "f" and (row := _first_bad_row(array)) is not None:
            client = int(np.searchsorted(offsets, row, side="right")) - 1
            raise FederationError(
                f"{source}: {name} of client {client}, row {row}, are not finite; remove or repair that row"
            )


def offsets_of(lengths: Iterable[int]) -> NDArray[np.int64]:
    """Return the offsets of clients with the given numbers of rows."""
    return np.concatenate([[0], np.cumsum(list(lengths), dtype=np.int64)]).astype(np.int64)


def _first_bad_row(array: NDArray[Any]) -> int | None:
    """Return the first row with a NaN or an infinity, reading a bounded part at a time."""
    for start in range(0, len(array), _SCAN_ROWS):
        finite: NDArray[np.bool_] = np.isfinite(array[start : start + _SCAN_ROWS])
        if not finite.all():
            rows = finite.reshape(len(finite), -1).all(axis=1)
            return start + int(rows.argmin())
    return None
