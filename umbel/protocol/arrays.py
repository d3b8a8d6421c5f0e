"""Named arrays, as in a model's state dict with an extra leading axis, and matrices of parameter vectors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
Vectors = NDArray[Any]
"""Parameter vectors as rows (m, n), in 32 bits as they travel, or in 64."""
Matrix = NDArray[np.float64]
Labels = NDArray[np.int64]

LARGEST_COVARIANCE = 256
"""Largest number of parameters of which a covariance, or second moments, are a matrix; above it they are a diagonal."""
_CACHED = 1 << 17  # 64-bit numbers that fit into a core's cache


class Packed(Arrays):
    """Named arrays (m, \\*shape) that are the columns of one matrix and share its memory.

    Parameters
    ----------
    matrix : ndarray, shape (m, n)
    shapes : mapping
        The shape of each array without the leading axis, in the order of the columns.
    """

    record: Any = None
    """The record that they were read from, which need not be written again (`umbel.protocol.records`)."""

    def __init__(self, matrix: NDArray[Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        columns = sum(math.prod(shape) for shape in shapes.values())
        if matrix.ndim != 2 or matrix.shape[1] != columns:
            raise ValueError(f"it is of shape {matrix.shape}, its name says {columns} columns")
        self._matrix = matrix
        self.update(_cut(matrix, shapes))
        self._columns = tuple(self.values())

    @property
    def matrix(self) -> NDArray[Any]:
        """The matrix; `ValueError` when arrays have been added or removed."""
        now = tuple(self.values())
        if len(now) != len(self._columns) or not all(map(is_, now, self._columns)):
            raise ValueError("these arrays are no longer the columns of one matrix")
        return self._matrix


def as_matrix(arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return named arrays of one type as one matrix (m, n), without a copy where they share a matrix already."""
    if isinstance(arrays, Packed):
        return arrays.matrix
    return flatten(arrays, next(iter(arrays.values())).dtype)


def in_blocks(vectors: Vectors, rows: NDArray[np.int64] | None = None) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Yield the columns of vectors (m, n), or of some rows, in 64 bits and in blocks.

    Blocks save memory: a copy of a whole large model would take as much memory again.
    """
    rows = rows if rows is not None and len(rows) < len(vectors) else None
    size = max(1, _CACHED // max(1, len(vectors if rows is None else rows)))
    for start in range(0, vectors.shape[1], size):
        columns = slice(start, start + size)
        block = vectors[:, columns]
        yield columns, (block if rows is None else block.take(rows, axis=0)).astype(np.float64, copy=False)


def mean_of(vectors: Vectors, rows: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
    """Return the mean (n,) of vectors (m, n), or of some rows, in 64 bits."""
    mean = np.empty(vectors.shape[1])
    for columns, block in in_blocks(vectors, rows):
        mean[columns] = block.sum(axis=0) / len(block)
    return mean


def all_finite(values: NDArray[Any], axis: int | None = None) -> Any:
    """Return whether 32-bit numbers, or sums of a few of them, are all finite, over the whole array or along an axis.

    One pass is enough: a sum of finite 32-bit numbers cannot overflow in 64 bits.
    """
    with np.errstate(invalid="ignore"):
        return np.isfinite(values.sum(axis=axis, dtype=np.float64))


def distances(
    vectors: Vectors, centre: NDArray[np.float64], rows: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """Return the distance of each of vectors (m, n), or of some rows, to a centre (n,)."""
    squares = np.zeros(len(vectors) if rows is None else len(rows))
    for columns, block in in_blocks(vectors, rows):
        squares += np.square(block - centre[columns]).sum(axis=1)
    lengths: NDArray[np.float64] = np.sqrt(squares)
    return lengths


def flatten(arrays: Mapping[str, NDArray[Any]], dtype: Any = np.float64) -> NDArray[Any]:
    """Return named arrays with a common leading axis (m, \\*shape) as one matrix (m, n), always a copy."""
    if isinstance(arrays, Packed):
        return arrays.matrix.astype(dtype)
    rows = len(next(iter(arrays.values())))
    parts = [value.reshape(rows, math.prod(value.shape[1:])) for value in arrays.values()]
    return np.concatenate(parts, axis=1, dtype=dtype)


def unflatten(matrix: NDArray[Any], like: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return a matrix (m, n) as named arrays (m, \\*shape), with `like`'s names, shapes and types."""
    shapes = {name: value.shape[1:] for name, value in like.items()}
    cut = _cut(matrix, shapes)
    return {
        name: (np.rint(value) if like[name].dtype.kind in "iu" else value).astype(like[name].dtype)
        for name, value in cut.items()
    }


def _cut(matrix: NDArray[Any], shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Return the columns of a matrix (m, n), in order, as arrays (m, \\*shape)."""
    arrays, start = {}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        arrays[name] = matrix[:, start:stop].reshape(len(matrix), *shape)
        start = stop
    return arrays
