"""Named arrays, as a model's state dict with one more axis in front, and matrices of parameter vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


def all_finite(values: NDArray[Any], axis: int | None = None) -> Any:
    """Return whether 32-bit numbers, or sums of a few of them, are all finite, over the whole array or along an axis.

    Their sum shows it, because finite ones cannot make it overflow in 64 bits: one pass over models that may be large.
    """
    with np.errstate(invalid="ignore"):
        return np.isfinite(values.sum(axis=axis, dtype=np.float64))


def flatten(arrays: Mapping[str, NDArray[Any]], dtype: Any = np.float64) -> NDArray[Any]:
    """Return named arrays with a common leading axis (m, \\*shape) as one matrix (m, n)."""
    rows = len(next(iter(arrays.values())))
    parts = [value.reshape(rows, math.prod(value.shape[1:])) for value in arrays.values()]
    return np.concatenate(parts, axis=1, dtype=dtype)


def unflatten(matrix: NDArray[Any], like: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return a matrix (m, n) as named arrays (m, \\*shape), with `like`'s names, shapes and types."""
    arrays = {name: np.empty((len(matrix), *value.shape[1:]), value.dtype) for name, value in like.items()}
    unflatten_into(arrays, matrix)
    return arrays


def unflatten_into(arrays: Mapping[str, NDArray[Any]], matrix: NDArray[Any]) -> None:
    """Write a matrix (m, n) to named arrays (m, \\*shape)."""
    start = 0
    for value in arrays.values():
        size = math.prod(value.shape[1:])
        value[...] = matrix[:, start : start + size].reshape(value.shape)
        start += size
