"""The QMNIST recipe: a few digits whose every place can be checked by hand."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.datasets.conftest import LAB, Recipe, assert_same, image, rows_of
from umbel.data import Dataset, open_dataset

pytestmark = pytest.mark.rest

recipe = Recipe("qmnist", LAB)
qmnist = recipe.module

# Writer and digit of each row; the rows of a writer do not lie together. Row r is drawn by `image`.
ROWS = [(7, 3), (2100, 0), (5, 9), (7, 4), (11, 1), (5, 9), (7, 3), (2100, 8)]


def idx(array: NDArray[Any]) -> bytes:
    """Write an array as IDX: two zero bytes, type, axes, the length of each axis; all big-endian."""
    kind = {"uint8": 0x08, "int32": 0x0C}[array.dtype.name]
    return (
        bytes([0, 0, kind, array.ndim])
        + np.array(array.shape, ">u4").tobytes()
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


def write_files(folder: Path, rows: list[tuple[int, int]], pictures: list[int] | None = None) -> tuple[Path, Path]:
    """Write images and labels of the given rows; `pictures` numbers the images, in order by default."""
    table = np.full((len(rows), 8), -1, np.int32)
    table[:, 0], table[:, 2] = [digit for _, digit in rows], [writer for writer, _ in rows]
    images, labels = folder / "images-idx3-ubyte", folder / "labels-idx2-int"
    drawn = [image(row) for row in pictures or range(len(rows))]
    images.write_bytes(idx(np.array(drawn, np.uint8).reshape(-1, 28, 28)))
    labels.write_bytes(idx(table))
    return images, labels


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_files(tmp_path, ROWS)


def run(files: tuple[Path, Path], out: Path, *options: str) -> Any:
    """Run the recipe's command line."""
    return recipe.run(out, "--images", files[0], "--labels", files[1], *options)


def made(files: tuple[Path, Path], out: Path, *options: str) -> Dataset:
    """Run it, and open what it wrote."""
    assert run(files, out, *options).exit_code == 0
    return open_dataset(out)


def test_a_client_is_a_writer_and_is_turned_as_a_whole(files: tuple[Path, Path], tmp_path: Path) -> None:
    dataset = made(files, tmp_path / "out", "--seed", "5")
    # By number the writers are 5, 7, 11, 2100. Seed 5 puts the last of them first, and turns all but the second client.
    generator = np.random.default_rng(5)
    assert generator.permutation(4).tolist() == [3, 1, 2, 0]
    assert generator.integers(2, size=4).tolist() == [1, 0, 1, 1]
    assert [rows_of(dataset, client) for client in range(4)] == [
        {1: (0, True), 7: (8, True)}, {0: (3, False), 3: (4, False), 6: (3, False)}, {4: (1, True)},
        {2: (9, True), 5: (9, True)},
    ]  # fmt: skip
    assert (dataset.manifest.groups, dataset.offsets.tolist()) == ([1, 0, 1, 1], [0, 2, 5, 6, 8])
    told = dataset.manifest
    assert (told.name, told.model, told.loss, told.feature_scale) == ("qmnist", "cnn10", "cross-entropy", 1 / 255)
    assert (dataset.features.dtype, dataset.targets.dtype) == (np.uint8, np.int64)
    # Compressed files are read too.
    packed = [Path(f"{path}.gz") for path in files]
    for path, file in zip(packed, files, strict=True):
        path.write_bytes(gzip.compress(file.read_bytes()))
    assert_same(made((packed[0], packed[1]), tmp_path / "packed", "--seed", "5"), dataset)


def test_rows_are_in_random_order_and_kept_up_to_the_number_asked(files: tuple[Path, Path], tmp_path: Path) -> None:
    whole, dataset = made(files, tmp_path / "whole"), made(files, tmp_path / "out", "--rows", "2")
    assert dataset.offsets.tolist() == [0, 1, 3, 5, 7]
    assert dataset.manifest.groups == whole.manifest.groups
    for client in range(4):
        assert rows_of(dataset, client).items() <= rows_of(whole, client).items()
    # Each pair of the three rows of writer 7 comes up for some seed.
    pairs = set()
    for seed in range(12):
        drawn = made(files, tmp_path / "out", "--rows", "2", "--seed", str(seed))
        pairs |= {frozenset(rows) for client in range(4) if (rows := rows_of(drawn, client)).keys() <= {0, 3, 6}}
    assert pairs == {frozenset({0, 3}), frozenset({0, 6}), frozenset({3, 6})}
    # Sorted by class, minibatches taken in order would each hold one class.
    rows = [(writer, digit) for writer in (1, 2) for digit in range(10) for _ in range(2)]
    dataset = made(write_files(tmp_path, rows), tmp_path / "sorted")
    for client in range(2):
        targets = dataset.client(client)[1]
        assert np.bincount(targets).tolist() == [2] * 10
        assert np.any(np.diff(targets) < 0)


OTHER_ROWS, OTHER_IMAGES = "does not hold rows of shape (8,)", "does not hold rows of shape (28, 28)"
ZEROS = idx(np.zeros((8, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("which", "content", "reasons"),
    [
        (0, None, ["cannot be read", f"download {qmnist.IMAGES_URL}"]),
        (1, None, ["cannot be read", f"download {qmnist.LABELS_URL}"]),
        (1, ZEROS, [OTHER_ROWS, qmnist.LABELS_URL]),  # the wrong way round
        (1, b"\0\0\x0c\x02\0\0", [OTHER_ROWS]),
        (0, ZEROS[:-1], [OTHER_IMAGES]),
        (0, idx(np.zeros((9, 28, 28), np.uint8)), ["has 9 images and "]),
        (1, gzip.compress(bytes(9999), mtime=0)[:20], ["cannot be read: "]),
        (1, idx(np.full((8, 8), 10, np.int32)), ["the label of row 0 is 10, not a class from 0 to 9"]),
    ],
)
def test_a_file_that_cannot_be_used_is_named_in_one_line(
    files: tuple[Path, Path], tmp_path: Path, which: int, content: bytes | None, reasons: list[str]
) -> None:
    path = tmp_path / "broken.gz" if "cannot be read" in reasons[0] else files[which]
    if content is not None:
        path.write_bytes(content)
    result = run((path, files[1]) if which == 0 else (files[0], path), tmp_path / "out")
    recipe.assert_refused(result, tmp_path / "out", str(path), *reasons)
    assert len(result.stderr.splitlines()) == 1, "this recipe shows no progress"
