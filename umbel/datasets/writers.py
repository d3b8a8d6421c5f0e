"""What the handwriting recipes share: images by writer -> a dataset with two groups of clients.

One client a writer. All images of a client are turned by 90 degrees counter-clockwise with
probability 1/2 (group privacy paper, Sec. 5.3), so that the clients are of two kinds, and the
manifest's ``groups`` tells which is which: 0 upright, 1 turned.
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

from umbel.data import Manifest, offsets_of, write_dataset
from umbel.protocol.errors import DatasetError

SIDE = 28
"""Height and width of an image, in pixels."""

Limit = Annotated[
    int | None, typer.Option(min=1, help="Rows kept of each writer at most, drawn at random.", show_default="all")
]
Seed = Annotated[
    int, typer.Option(min=0, help="Seed of the order of clients, and so of the split; of who is turned; of rows.")
]
"""Options of the recipes."""


@dataclass(frozen=True)
class Handwriting:
    """Images with their class and their writer, a row each, in any order.

    Attributes
    ----------
    images : ndarray of uint8, shape (rows, 28, 28)
        Grey values as they were found.
    labels : ndarray of int64, shape (rows,)
        Class of each image.
    writers : ndarray, shape (rows,)
        Who wrote it, a number or a name.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    writers: NDArray[Any]


@dataclass(frozen=True)
class About:
    """What a recipe knows of its data: entries of the manifest.

    Attributes
    ----------
    name, model, provenance, licence : str
        See `dataset.Manifest`; how the dataset was drawn is added to the provenance.
    recipe : str
        Name of the script.
    """

    recipe: str
    name: str
    model: str
    provenance: str
    licence: str


def build(
    found: Handwriting, about: About, rows: int | None = None, seed: int = 0
) -> tuple[Manifest, NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Turn handwriting into a dataset.

    Writers take the clients' places in random order; the first 90 % train. The order of the rows
    given plays no part.

    Parameters
    ----------
    found : Handwriting
        The rows.
    about : About
        What the manifest says of them.
    rows : int, optional
        Rows kept of each client at most, drawn at random; all by default.
    seed : int
        Seed of the one generator that everything is drawn from.

    Returns
    -------
    manifest, features, targets, offsets
        As in `umbel.data.Dataset`: a row is an image (28, 28) of bytes, and the target its class; a client's rows come
        in random order.

    Raises
    ------
    DatasetError
        When there are fewer than two writers.
    """
    # Sorted, so that the result does not depend on the order of the rows.
    names, writer = np.unique(found.writers, return_inverse=True)
    clients = len(names)
    if clients < 2:
        raise DatasetError(
            f"{about.name}: {clients} writers, and at least 2 are needed to train and validate; give all of the data",
            code="data.too-few-clients",
        )
    generator = np.random.default_rng(seed)
    order = generator.permutation(clients)
    turned = generator.integers(2, size=clients)
    by_writer = np.split(np.argsort(writer, kind="stable"), np.cumsum(np.bincount(writer))[:-1])
    kept: list[NDArray[np.int64]] = []
    for one in order:
        own = by_writer[one]
        # The rows of a writer have no names: their content settles which comes first.
        ranked = sorted(own, key=lambda row: (found.labels[row], found.images[row].tobytes()))
        kept.append(np.array(ranked, np.int64)[generator.permutation(len(own))[:rows]])
    offsets = offsets_of(map(len, kept))
    # Filled client by client: the images are large, and one copy of them is enough.
    features = np.empty((offsets[-1], SIDE, SIDE), np.uint8)
    for client, own in enumerate(kept):
        features[offsets[client] : offsets[client + 1]] = np.rot90(found.images[own], turned[client], axes=(1, 2))
    # In whole numbers, where no rounding can move the border.
    train = clients * 9 // 10
    limit = "" if rows is None else f"; of each writer at most {rows} rows, drawn at random"
    manifest = Manifest(
        name=about.name,
        model=about.model,
        loss="cross-entropy",
        clients=clients,
        split={"train": train, "validation": clients - train},
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
    split = manifest.split
    return [
        f"{split['train']} training and {split['validation']} validation clients, {len(targets)} rows; "
        f"clients whose images are turned: {sum(manifest.groups)}",
        str(folder),
    ]


def check_classes(labels: NDArray[Any], classes: int, source: Path | str) -> NDArray[np.int64]:
    """Return labels as int64, or raise where one is no class from 0 to `classes` - 1; `source` is named in errors."""
    if labels.ndim != 1:
        raise DatasetError(f"{source}: labels must be a list of classes, got shape {labels.shape}", code="data.classes")
    if labels.dtype.kind not in "iu":
        raise DatasetError(
            f"{source}: labels must be whole numbers, got {labels.dtype}; give the original file", code="data.classes"
        )
    if len(bad := np.flatnonzero((labels < 0) | (labels >= classes))):
        raise DatasetError(
            f"{source}: the label of row {bad[0]} is {labels[bad[0]]}, not a class from 0 to {classes - 1}; "
            "give the original file",
            code="data.classes",
        )
    return labels.astype(np.int64)
