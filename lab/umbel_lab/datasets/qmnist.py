"""Recipe: handwritten digits by 539 writers, one client for each writer, in two groups of clients.

The MNIST training images with the QMNIST labels, which name the writer of each. They come from the same source as
FEMNIST's digits and are small enough for two cores: the experiment of Sec. 5.3 of the group privacy paper in miniature.
All images of a client are turned by 90 degrees counter-clockwise with probability 1/2.

    python lab/umbel_lab/datasets/qmnist.py --help
"""

from __future__ import annotations

import gzip
import math
import sys
import zlib
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from umbel.data import BUNDLED

# Python does not find the modules beside a script that is loaded by path.
sys.path.insert(0, str(BUNDLED))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from writers import SIDE, About, Handwriting, Limit, Seed, check_classes, write

from umbel.data import DatasetError
from umbel.data.making import Out, command, writing

IMAGES_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/train-images-idx3-ubyte.gz"
LABELS_URL = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/qmnist-train-labels-idx2-int.gz"

CLASSES = 10

COLUMNS = 8
"""Columns of the QMNIST labels."""

CLASS, WRITER = 0, 2
"""The two columns that are read: the digit, and NIST's number of its writer."""

ABOUT = About(
    recipe="qmnist",
    name="qmnist",
    model="cnn10",
    provenance=(
        "Images: MNIST training set (LeCun, Cortes, Burges). Labels and writers: QMNIST (Yadav, Bottou; "
        "github.com/facebookresearch/qmnist), training set. Both from NIST special database 19."
    ),
    licence=(
        "labels: QMNIST, BSD-style licence, copyright Facebook, Inc. and its affiliates; images: MNIST, copyright "
        "Yann LeCun and Corinna Cortes, CC BY-SA 3.0"
    ),
)

app = command()


def read_idx(path: Path, dtype: str, shape: tuple[int, ...], url: str) -> NDArray[np.generic]:
    """Read a file of MNIST's format IDX, plain or compressed (.gz), as it is stored: (rows, *shape).

    `dtype` is the required type in NumPy's notation, ``">u1"`` or ``">i4"``; `url` is its source, for errors.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} cannot be read: {error}; download {url}", code="data.unreadable") from None
    # Two zero bytes, the type, the number of axes, then the length of each axis, big-endian.
    magic = bytes([0, 0, {">u1": 0x08, ">i4": 0x0C}[dtype], 1 + len(shape)])
    start = 4 + 4 * (1 + len(shape))
    rows, lengths = raw[4:8], np.array(shape, ">u4").tobytes()
    size = int.from_bytes(rows) * math.prod(shape) * np.dtype(dtype).itemsize
    if raw[:start] != magic + rows + lengths or len(raw) - start != size:
        wrong = f"{path} does not hold rows of shape {shape}, or not all of them"
        raise DatasetError(f"{wrong}; download {url}", code="data.unreadable")
    return np.frombuffer(raw, dtype, offset=start).reshape(-1, *shape)


def read_digits(images: Path, labels: Path) -> Handwriting:
    """Read MNIST images with their QMNIST labels; row ``i`` of one file belongs to row ``i`` of the other."""
    # Labels first: they are small.
    table = read_idx(labels, ">i4", (COLUMNS,), LABELS_URL)
    pixels = read_idx(images, ">u1", (SIDE, SIDE), IMAGES_URL)
    if len(pixels) != len(table):
        wrong = f"{images} has {len(pixels)} images and {labels} has {len(table)} labels"
        raise DatasetError(f"{wrong}; give the two training files", code="data.lengths")
    classes = check_classes(table[:, CLASS], CLASSES, labels)
    return Handwriting(pixels.astype(np.uint8, copy=False), classes, table[:, WRITER])


@app.command()
def main(
    images: Annotated[Path, typer.Option(help="MNIST's train-images-idx3-ubyte, compressed (.gz) or not.")],
    labels: Annotated[Path, typer.Option(help="QMNIST's qmnist-train-labels-idx2-int, compressed (.gz) or not.")],
    out: Out = None,
    rows: Limit = None,
    seed: Seed = 0,
) -> None:
    """Write MNIST's digits as a dataset, one client per writer. Half of them have images turned by 90 degrees."""
    with writing(out, "qmnist") as folder:
        lines = write(folder, read_digits(images, labels), ABOUT, rows, seed)
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    app()
