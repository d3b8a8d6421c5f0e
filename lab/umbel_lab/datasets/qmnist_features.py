"""Recipe: handwritten digits as a few public features, for guarantees with a small, formal epsilon.

The price n/nu of a guarantee grows with the number n of parameters that a client releases: 1.2 million for a network,
100 for a linear layer on 10 features. The map from images to features is learnt from MNIST's test images, without
labels; their writers did not write the training images. It is the same at all clients and never trained. The kinds:

- ``neighbours``: the position of an image among the public ones. Each public image is joined to those with the most
  similar gradients, and the smoothest functions on that graph are its features (the Laplacian eigenmaps of Belkin and
  Niyogi, 2003); the features of any other image are the mean over its neighbours. They separate the ten digits almost
  without training. They need as many features as there are kinds of images: 10, or 20 if half of them are turned;
- ``images``: the images themselves, so that whole networks can be trained at the same clients.

The training images of a writer are dealt to clients of 30 images, three or four clients for each writer. With
``--rows 80`` each writer with enough images is one client, and a guarantee for a client is one for a writer.

With ``--digits 5`` images are dealt to clients of at most five digits, regardless of their writers: the users of Shen
et al. (ICLR 2023), who learn a representation together and keep their heads local.

    python lab/umbel_lab/datasets/qmnist_features.py --help
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from sklearn.decomposition import PCA
from sklearn.manifold import SpectralEmbedding
from sklearn.neighbors import KNeighborsRegressor

from umbel.data import BUNDLED

# Python does not find the modules beside a script that is loaded by path.
sys.path.insert(0, str(BUNDLED))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import qmnist
from writers import SIDE, Handwriting, build

from umbel.data import DatasetError, Manifest, offsets_of, write_dataset
from umbel.data.making import command, counted, split_of, writing

NAMES = {False: ("qmnist-features", "qmnist-images"), True: ("qmnist-users", "qmnist-users-images")}
"""Names of the datasets of features and of images, by whether clients have few digits."""
PUBLIC_IMAGES_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-images-idx3-ubyte.gz"
PUBLIC_LABELS_URL = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/qmnist-test-labels-idx2-int.gz"

DIRECTIONS = 12
"""Number of bins for the direction of a gradient."""
COMPONENTS = 60
"""Number of principal components in which neighbours are searched."""
NEIGHBOURS = 10

MODELS = {False: "lenet10", True: "mlp inputs=784 hidden=256,128 outputs=10"}
"""Models of images, by whether clients have few digits: umbel's smallest network, and one of 235,146 parameters."""

_CHUNK = 2000  # images at a time: a histogram takes four times the memory of its image as 32-bit numbers

Images = NDArray[np.uint8]
Rows = NDArray[np.float32]
Map = Callable[[Images], Rows]
Dealt = tuple[Images, NDArray[np.int64], list[int], dict[str, int]]  # images, classes, rows of clients, and the split

app = command()


class Kind(StrEnum):
    """The source of features; `IMAGES` means no features."""

    NEIGHBOURS = "neighbours"
    IMAGES = "images"


def gradients(images: Images) -> Rows:
    """Return histograms of gradients: how much ink ends where, and in which direction (Dalal and Triggs, 2005).

    Each direction's share of the gradient is smoothed and sampled on a grid. An image's numbers have norm 1 after their
    square roots are taken, so that a bold stroke counts little more than a fine one.
    """
    grey = gaussian_filter(images.astype(np.float32) / 255, (0, 0.7, 0.7))
    down, right = np.gradient(grey, axis=(1, 2))
    size, direction = np.hypot(down, right), np.arctan2(down, right) / (2 * np.pi) * DIRECTIONS
    cells = []
    for own in range(DIRECTIONS):
        # Shared between the two nearest directions, so that a small turn changes little.
        away = np.abs((direction - own + DIRECTIONS / 2) % DIRECTIONS - DIRECTIONS / 2)
        cells.append(gaussian_filter(size * np.maximum(0, 1 - away), (0, 2, 2))[:, 2::3, 2::3])
    counts: Rows = np.sqrt(np.stack(cells, axis=-1).reshape(len(images), -1)).astype(np.float32)
    counts /= np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-6)
    return counts


def in_chunks(make: Map, images: Images) -> Rows:
    """Apply `make` to images in chunks."""
    parts = [make(images[begin : begin + _CHUNK]) for begin in range(0, len(images), _CHUNK)]
    return np.concatenate(parts).astype(np.float32)


def learn(public: Images, features: int) -> Map:
    """Learn from public images (rows, 28, 28) a map to features, the `Kind.NEIGHBOURS`.

    Over the public images, features have mean square 1 on average.
    """
    least = max(features, COMPONENTS) + 1
    if len(public) < least:
        wrong = f"{features} features need {least} public images, got {len(public)}"
        raise DatasetError(f"{wrong}; give all of them", code="data.too-few-rows")
    near = principal(public, COMPONENTS)
    rows = in_chunks(near, public)
    graph = SpectralEmbedding(features, affinity="nearest_neighbors", n_neighbors=NEIGHBOURS, random_state=0)
    smooth = graph.fit_transform(rows)
    smooth /= np.sqrt(np.square(smooth).mean(axis=0))
    mean = KNeighborsRegressor(NEIGHBOURS, algorithm="brute").fit(rows, smooth)
    return lambda images: mean.predict(near(images))


def principal(public: Images, features: int) -> Map:
    """Return the map to principal components of gradients, each divided by the root of its standard deviation.

    Unscaled components would let the first few drown the others; white ones would count noise as much as signal.
    """
    components = PCA(features, svd_solver="covariance_eigh").fit(in_chunks(gradients, public))
    deviations = np.sqrt(np.maximum(components.explained_variance_, 1e-12))
    # Components have mean square v^(1/2) each after this, and 1 on average after the second factor.
    scale = np.sqrt(deviations.mean()) * np.sqrt(deviations)
    return lambda images: (components.transform(gradients(images)) / scale).astype(np.float32)


def read_public(images: Path, labels: Path) -> tuple[Images, NDArray[np.int64]]:
    """Read MNIST's test images and their writers.

    QMNIST has 60,000 test labels, of which the first 10,000 are those of MNIST's test images.
    """
    table = qmnist.read_idx(labels, ">i4", (qmnist.COLUMNS,), PUBLIC_LABELS_URL)
    pictures = qmnist.read_idx(images, ">u1", (SIDE, SIDE), PUBLIC_IMAGES_URL)
    if len(pictures) > len(table):
        wrong = f"{images} has {len(pictures)} images and {labels} has {len(table)} labels"
        raise DatasetError(f"{wrong}; give the two test files", code="data.lengths")
    return pictures.astype(np.uint8, copy=False), table[: len(pictures), qmnist.WRITER].astype(np.int64)


def deal(found: Handwriting, rows: int, seed: int) -> Dealt:
    """Deal the images of each writer to clients of `rows` images.

    All clients of a writer train, or all validate. A remainder of fewer than `rows` images is left out.
    """
    whole, images, classes, ends = build(found, qmnist.ABOUT, None, seed)
    per_writer = np.diff(ends) // rows
    train, clients = int(per_writer[: whole.train].sum()), int(per_writer.sum())
    if not 0 < train < clients:
        wrong = f"{NAMES[False][0]}: {train} training and {clients - train} validation clients of {rows} images"
        raise DatasetError(f"{wrong}; lower --rows", code="data.too-few-clients")
    # The rows of a writer are in random order: any run of them is a random draw.
    begins = np.concatenate([ends[i] + rows * np.arange(often) for i, often in enumerate(per_writer)])
    kept = (begins[:, None] + np.arange(rows)).ravel()
    dealt = images[kept]
    turned = np.repeat(np.repeat(whole.groups, per_writer) == 1, rows)
    dealt[turned] = np.rot90(dealt[turned], -1, axes=(1, 2))
    return dealt, classes[kept], [rows] * clients, {"train": train, "validation": clients - train}


def deal_digits(found: Handwriting, rows: int, digits: int, seed: int) -> Dealt:
    """Deal images to clients of so many rows and at most so many digits, regardless of their writers.

    The images of each digit are cut into shards, and each client gets `digits` of these (McMahan et al., AISTATS 2017).
    A remainder is left out. 90 % of the clients train.
    """
    generator = np.random.default_rng(seed)
    size = rows // digits
    if not size:
        wrong = f"{rows} images are not enough for {digits} digits"
        raise DatasetError(f"{wrong}; raise --rows", code="data.too-few-rows")
    shards = []
    for digit in range(qmnist.CLASSES):
        own = generator.permutation(np.flatnonzero(found.labels == digit))
        shards.append(own[: len(own) // size * size].reshape(-1, size))
    drawn = generator.permutation(np.concatenate(shards))
    clients = len(drawn) // digits
    kept = generator.permuted(drawn[: clients * digits].reshape(clients, digits * size), axis=1).ravel()
    split = split_of(clients, 90, f"{NAMES[True][0]}: {clients} clients", "give all of the data")
    return found.images[kept], found.labels[kept], [digits * size] * clients, split


@app.command()
def main(
    images: Annotated[Path, typer.Option(help="MNIST's train-images-idx3-ubyte, compressed (.gz) or not.")],
    labels: Annotated[Path, typer.Option(help="QMNIST's qmnist-train-labels-idx2-int, compressed (.gz) or not.")],
    public_images: Annotated[Path, typer.Option(help="MNIST's t10k-images-idx3-ubyte, compressed (.gz) or not.")],
    public_labels: Annotated[Path, typer.Option(help="QMNIST's qmnist-test-labels-idx2-int, compressed (.gz) or not.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write.", show_default="$UMBEL_HOME/data, under the dataset's name")
    ] = None,
    kind: Annotated[
        Kind, typer.Option(help="Kind of the features; images: the images themselves, without features.")
    ] = Kind.NEIGHBOURS,
    features: Annotated[int, typer.Option(min=1, help="Features of an image.")] = 10,
    rows: Annotated[int, typer.Option(min=1, help="Images of a client.")] = 30,
    digits: Annotated[
        int, typer.Option(min=0, max=10, help="Make clients of at most so many digits; 0: each of one writer.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split and of each client's rows.")] = 0,
) -> None:
    """Write MNIST's digits as a dataset of features that are learnt from public images of other writers."""
    name = NAMES[digits > 0][kind is Kind.IMAGES]
    with writing(out, name) as folder:
        public, others = read_public(public_images, public_labels)
        found = qmnist.read_digits(images, labels)
        if len(both := np.intersect1d(found.writers, others)):
            wrong = f"{public_labels}: writer {both[0]} also wrote images in {images}, which are not public"
            raise DatasetError(f"{wrong}; give the test files", code="data.twice")
        if digits:
            dealt, classes, lengths, split = deal_digits(found, rows, digits, seed)
            cut = f"The images of each digit are dealt out to clients of {rows} images and at most {digits} digits."
        else:
            dealt, classes, lengths, split = deal(found, rows, seed)
            most = int(np.unique(found.writers, return_counts=True)[1].max()) // rows
            promised = f"a writer has up to {most}, and a guarantee is for one" if most > 1 else "one client a writer"
            cut = (
                f"The images of a writer are dealt out to clients of {rows} images: {promised}. No writer both trains "
                "and validates."
            )
        made: Images | Rows = dealt
        model, scale, about, what = MODELS[digits > 0], 1 / 255, "", "images"
        if kind is not Kind.IMAGES:
            made, model, scale = (
                in_chunks(learn(public, features), dealt),
                f"softmax features={features} classes=10",
                1.0,
            )
            about = (
                f" {features} features of an image, of kind {kind}, learnt without labels from {len(public)} MNIST "
                f"test images of {len(np.unique(others))} other writers."
            )
            what = f"rows of {features} features"
        manifest = Manifest(
            name=name,
            model=model,
            loss="cross-entropy",
            clients=len(lengths),
            split=split,
            feature_scale=scale,
            provenance=(
                f"{qmnist.ABOUT.provenance}{about} {cut} Made by datasets/qmnist_features.py with seed {seed}."
            ),
            licence=qmnist.ABOUT.licence,
        )
        write_dataset(folder, manifest, made, classes, offsets_of(lengths))
    typer.echo(f"{counted(manifest)}, {len(classes)} {what}")
    typer.echo(folder)


if __name__ == "__main__":
    app()
