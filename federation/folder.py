"""A folder of memory-mapped arrays, for federations of any size."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.data import Federation, check
from federation.leaf import read_json
from federation.manifest import Manifest
from protocol.errors import FederationError


def open_folder(folder: Path) -> Federation:
    manifest = Manifest.read(read_json(folder / "manifest.json"), folder / "manifest.json")
    arrays = {}
    for name in ("features", "targets", "offsets"):
        file = folder / f"{name}.npy"
        try:
            # As a plain array: numpy's subclass takes longer over each access than a small cohort's rows.
            arrays[name] = np.lib.format.open_memmap(file, mode="r").view(np.ndarray)
        except FileNotFoundError:
            raise FederationError(f"{file} is missing; write the federation again with its recipe") from None
        except Exception as error:  # whatever numpy makes of a header that is none
            raise FederationError(f"{file} is not a plain .npy array: {error}") from None
    return Federation(manifest, arrays["features"], arrays["targets"], arrays["offsets"])


def check_out(folder: Path) -> None:
    """Raise before the work where its result could not be written."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "manifest.json").exists():
        raise FederationError(f"{folder} exists and is not a federation; give another folder with --out")
    # The folder is put in place by a rename, so it is the one above it that must be writable.
    above = next(parent for parent in folder.parents if parent.exists())
    if (folder.exists() and not folder.is_dir()) or not above.is_dir() or not os.access(above, os.W_OK):
        raise FederationError(f"{folder} cannot be written; give a folder that can with --out")


def write_federation(
    folder: Path,
    manifest: Manifest,
    features: NDArray[Any],
    targets: NDArray[Any],
    offsets: NDArray[np.int64],
) -> None:
    """Check a federation and write it as a folder, whole or not at all.

    Replaces a federation already there; any other non-empty folder is left alone with an error.
    """
    check(Federation(manifest, features, targets, offsets), folder)
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / "manifest.json").exists())):
        raise FederationError(f"{folder} exists and is not a federation; give another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        np.save(new / "features.npy", features)
        np.save(new / "targets.npy", targets)
        np.save(new / "offsets.npy", offsets.astype(np.int64))
        (new / "manifest.json").write_text(json.dumps(manifest.model_dump(), indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
