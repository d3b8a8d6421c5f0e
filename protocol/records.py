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

_ROWS = "rows"
_LONGEST_HEADER = 1 << 20  # of an array, in bytes: some thousands of names

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


def pack(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays (m, \\*shape) as a record of one array of m rows, each with a field a name.

    Flower sends every array of a record by itself, in two requests, each of which a SuperLink's database waits for.
    """
    lengths = {len(value) for value in arrays.values()}
    if len(lengths) != 1:
        raise ValueError(f"arrays of one length can be packed, not of {sorted(lengths)}")
    dtype = _row_type(tuple((name, value.dtype.str, value.shape[1:]) for name, value in arrays.items()))
    rows = np.empty(lengths.pop(), dtype)
    for name, value in arrays.items():
        rows[name] = value
    record = ArrayRecord()
    record[_ROWS] = _encode(rows)
    return record


def unpack(record: ArrayRecord) -> Arrays:
    """Return what `pack` made a record of, as views of its memory that cannot be written to.

    Raises
    ------
    ProtocolError
        When the record is anything else.
    """
    if list(record.keys()) != [_ROWS]:
        raise ProtocolError(f"the arrays are not one of rows, called {_ROWS!r}")
    rows = from_array_record(record)[_ROWS]
    if rows.ndim != 1 or rows.dtype.names is None:
        raise ProtocolError(f"array {_ROWS!r} has no rows of named fields")
    return {name: rows[name] for name in rows.dtype.names}


def _encode(value: NDArray[Any]) -> Array:
    name, header = _header(value.dtype, value.shape)
    numbers = value if value.dtype.names is None else value.view(np.uint8)  # names may not be such as a buffer takes
    return Array(name, value.shape, SType.NUMPY, b"".join((header, numbers.data if value.size else b"")))


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


@lru_cache(maxsize=16)
def _row_type(fields: tuple[tuple[str, str, tuple[int, ...]], ...]) -> np.dtype[Any]:
    return np.dtype(list(fields))


@lru_cache(maxsize=256)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, bytes]:
    """Return the name of a type, and the beginning of an array in numpy's format."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    buffer = BytesIO()
    try:
        np.lib.format.write_array_header_1_0(buffer, header)
    except ValueError:  # of a model of a thousand layers it is longer than that version takes
        buffer = BytesIO()
        np.lib.format.write_array_header_2_0(buffer, header)
    return str(dtype) if dtype.names is None else dtype.name, buffer.getvalue()


@lru_cache(maxsize=256)
def _parse_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]]:
    """Return type, shape and order of an array in numpy's format."""
    buffer = BytesIO(header)
    version = np.lib.format.read_magic(buffer)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, fortran, dtype = read(buffer, max_header_size=_LONGEST_HEADER)
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"it is of type {dtype} and shape {shape}")
    return dtype, shape, "F" if fortran else "C"
