"""Shared code of the handwriting recipes: from images by writer to a dataset with two groups of clients.

Each writer is a client. All images of a client are turned by 90 degrees counter-clockwise with probability 1/2 (group
privacy paper, Sec. 5.3). So there are two groups of clients, and the manifest's ``groups`` gives each client's: 0
upright, 1 turned.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

# A script finds modules next to itself; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from umbel.data import DatasetError, Manifest, offsets_of, write_dataset
from umbel.data.making import counted, split_of

SIDE = 28
"""Height and width of an image, in pixels."""

Limit = Annotated[
    int | None, typer.Option(min=1, help="Maximum rows of a writer, drawn at random.", show_default="all")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the split, of the turned clients and of the rows drawn.")]
"""Options of the recipes."""


@dataclass(frozen=True)
class Handwriting:
    """Grey images (rows, 28, 28) in their original orientation, with classes and writers (rows,), in any order.

    A writer is a number or a name.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    writers: NDArray[Any]


@dataclass(frozen=True)
class About:
    """Facts about a recipe's data, the script of that name: entries of the manifest (`umbel.Manifest`).

    `build` adds to the provenance how it drew the dataset.
    """

    recipe: str
    name: str
    model: str
    provenance: str
    licence: str


def build(
    found: Handwriting, about: About, rows: int | None = None, seed: int = 0
) -> tuple[Manifest, NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Turn handwriting into a dataset; the order of the rows in `found` does not matter.

    Writers become clients in random order; the first 90 % train. Of each, at most `rows` are kept, drawn at random. The
    results are as in `umbel.data.Dataset`: a row is an image (28, 28) of bytes, and the target its class; a client's
    rows come in random order.
    """
    # Sorted, so that the result does not depend on the order of the rows.
    names, writer = np.unique(found.writers, return_inverse=True)
    clients = len(names)
    split = split_of(clients, 90, f"{about.name}: {clients} writers", "give all of the data")
    generator = np.random.default_rng(seed)
    order = generator.permutation(clients)
    turned = generator.integers(2, size=clients)
    by_writer = np.split(np.argsort(writer, kind="stable"), np.cumsum(np.bincount(writer))[:-1])
    kept: list[NDArray[np.int64]] = []
    for one in order:
        own = by_writer[one]
        # The rows of a writer have no names, so their content decides which comes first.
        ranked = sorted(own, key=lambda row: (found.labels[row], found.images[row].tobytes()))
        kept.append(np.array(ranked, np.int64)[generator.permutation(len(own))[:rows]])
    offsets = offsets_of(map(len, kept))
    # Filled client by client: the images are large, and a second copy would not fit.
    features = np.empty((offsets[-1], SIDE, SIDE), np.uint8)
    for client, own in enumerate(kept):
        features[offsets[client] : offsets[client + 1]] = np.rot90(found.images[own], turned[client], axes=(1, 2))
    limit = "" if rows is None else f"; of each writer at most {rows} rows, drawn at random"
    manifest = Manifest(
        name=about.name,
        model=about.model,
        loss="cross-entropy",
        clients=clients,
        split=split,
        feature_scale=1 / 255,
        groups=turned.tolist(),
        provenance=(
            f"{about.provenance} One client a writer; all images of a client turned by 90 degrees counter-clockwise "
            f"with probability 1/2 (group 1){limit}. Made by datasets/{about.recipe}.py with seed {seed}."
        ),
        licence=about.licence,
    )
    return manifest, features, found.labels[np.concatenate(kept)], offsets


def write(folder: Path, found: Handwriting, about: About, rows: int | None, seed: int) -> list[str]:
    """Build a dataset, write it, and return the lines to print about it."""
    manifest, features, targets, offsets = build(found, about, rows, seed)
    write_dataset(folder, manifest, features, targets, offsets)
    turned = f"clients whose images are turned: {sum(manifest.groups)}"
    return [f"{counted(manifest)}, {len(targets)} rows; {turned}", str(folder)]


def check_classes(labels: NDArray[Any], classes: int, source: Path | str) -> NDArray[np.int64]:
    """Return labels as int64, or raise for a label outside 0 to `classes` - 1; `source` is named in errors."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        wrong = f"labels must be a list of whole numbers, got {labels.dtype} of shape {labels.shape}"
    elif len(bad := np.flatnonzero((labels < 0) | (labels >= classes))):
        wrong = f"the label of row {bad[0]} is {labels[bad[0]]}, not a class from 0 to {classes - 1}"
    else:
        return labels.astype(np.int64)
    raise DatasetError(f"{source}: {wrong}; give the original file", code="data.classes")
