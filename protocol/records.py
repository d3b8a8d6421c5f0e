"""Flower's records: named arrays to and from them, and how they are taken out of a message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from typing import Any, Literal, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from protocol.arrays import Arrays
from protocol.errors import ProtocolError
from protocol.flower import SType

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)


def record_in(content: RecordDict, name: str, kind: type[R]) -> R:
    """Return the record of that name; `ProtocolError` if there is none of that kind."""
    # By itself: `RecordDict.array_records` and its like make a new dictionary of all of them each time.
    record = content.get(name)
    if not isinstance(record, kind):
        raise ProtocolError(f"there is no {kind.__name__} {name!r}")
    return record


def to_array_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as Flower's record, each as ``Array(value)`` would be but copied once."""
    record = ArrayRecord()
    for name, value in arrays.items():  # given as a whole they would be made a second time
        record[name] = _encode(np.asarray(value, order="C"))
    return record


def from_array_record(record: ArrayRecord) -> Arrays:
    """Return Flower's record as named arrays, which share the record's memory and cannot be written to.

    Raises
    ------
    ProtocolError
        When an array is not in numpy's format, holds objects, or is shorter than it says.
    """
    arrays = {}
    for name, value in record.items():
        try:
            arrays[name] = _decode(value)
        except Exception as error:  # whatever numpy makes of bytes that are no array
            raise ProtocolError(f"array {name!r} cannot be read: {error}") from None
    return arrays


def _encode(value: NDArray[Any]) -> Array:
    name, header = _header(value.dtype, value.shape)
    return Array(name, value.shape, SType.NUMPY, b"".join((header, value.data if value.size else b"")))


def _decode(array: Array) -> NDArray[Any]:
    data = array.data
    if array.stype != SType.NUMPY:
        raise ValueError(f"its format is {array.stype!r}")
    # The length of the header is in 2 bytes, from version 2 of the format in 4.
    prefix = 10 if data[6:7] == b"\x01" else 12
    start = prefix + int.from_bytes(data[8:prefix], "little")
    dtype, shape, order = _parse_header(data[:start])
    flat: NDArray[Any] = np.frombuffer(data, dtype, math.prod(shape), start)
    return flat.reshape(shape, order=order)


@lru_cache(maxsize=256)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, bytes]:
    """Return the name of a type, and the beginning of an array in numpy's format."""
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    return str(dtype), buffer.getvalue()


@lru_cache(maxsize=256)
def _parse_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]]:
    """Return type, shape and order of an array in numpy's format."""
    buffer = BytesIO(header)
    version = np.lib.format.read_magic(buffer)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, fortran, dtype = read(buffer)
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"it is of type {dtype} and shape {shape}")
    return dtype, shape, "F" if fortran else "C"
