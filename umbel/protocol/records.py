"""Flower's records: conversion to and from named arrays, and reading them from a message."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from operator import attrgetter
from typing import Any, Literal, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from umbel.protocol.arrays import Arrays, Packed, as_matrix
from umbel.protocol.errors import ProtocolError
from umbel.protocol.flower import SType, encoded, filled

_LONGEST_NAME = 1 << 18  # of a matrix, in characters: names and shapes of some thousands of parameters
_MOST_AXES = 32

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)


def record_in(content: RecordDict, name: str, kind: type[R]) -> R:
    """Return the record of that name and kind; `ProtocolError` if there is none."""
    # `RecordDict.array_records` and its like make a new dictionary of all records on each call.
    record = content.get(name)
    if not isinstance(record, kind):
        raise ProtocolError(f"there is no {kind.__name__} {name!r}", code="protocol.records")
    return record


def to_array_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays as Flower's record, equal to ``Array(value)`` for each but copied only once."""
    return filled(ArrayRecord(), {name: _encode(np.asarray(value, order="C")) for name, value in arrays.items()})


def from_array_record(record: ArrayRecord) -> Arrays:
    """Return Flower's record as named arrays, which are read-only and share the record's memory.

    `ProtocolError` for an array that is not in NumPy's format, holds objects, or is shorter than it says.
    """
    arrays = {}
    for name, value in record.items():
        try:
            arrays[name] = _decode(value)
        except Exception as error:  # NumPy may raise anything for bytes that are no array
            raise ProtocolError(f"array {name!r} cannot be read: {error}", code="protocol.arrays") from None
    return arrays


def pack(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return named arrays (m, \\*shape) of one type as a record of one matrix (m, n), whose name describes its columns.

    Flower sends every array of a record separately, in two requests, and each waits for a SuperLink's database.
    The name is JSON: an object with each array's name and shape, in order.
    """
    if isinstance(arrays, Packed) and arrays.record is not None:
        known: ArrayRecord = arrays.record
        return known
    lengths, types = ({of(value) for value in arrays.values()} for of in (len, attrgetter("dtype")))
    if len(lengths) != 1 or len(types) != 1:
        raise ValueError(f"only arrays of one length and type can be packed, not lengths {lengths} and types {types}")
    name = _name(tuple((name, value.shape[1:]) for name, value in arrays.items()))
    return to_array_record({name: as_matrix(arrays)})


def unpack(record: ArrayRecord) -> Packed:
    """Unpack a record from `pack` as read-only views; `ProtocolError` for any other record."""
    if len(record) != 1:
        raise ProtocolError(f"the record has {len(record)} arrays instead of one matrix", code="protocol.arrays")
    ((name, array),) = record.items()
    try:
        packed = Packed(_decode(array), _columns(name))
    except Exception as error:  # a sender may put anything there
        raise ProtocolError(f"the matrix cannot be read: {error}", code="protocol.arrays") from None
    packed.record = record
    return packed


MOST_STEPS = 2**15 - 1
"""The largest multiple that fits 16 bits."""


def in_steps(arrays: Arrays, step: float) -> Packed:
    """Return multiples of `step`, a power of two, as 16-bit integers: how many steps each is, at most `MOST_STEPS`."""
    times = as_matrix(arrays) / np.float32(step)
    return _of(times.clip(-MOST_STEPS, MOST_STEPS, out=times).astype(np.int16), arrays)


def times_step(arrays: Arrays, step: Any) -> Packed:
    """Undo `in_steps`; `ProtocolError` for arrays of another kind."""
    matrix = as_matrix(arrays)
    if type(step) is not float or math.frexp(step)[0] != 0.5 or matrix.dtype != np.int16:
        raise ProtocolError("its numbers are not multiples of a power of two", code="protocol.arrays")
    with np.errstate(over="ignore"):  # too large a value becomes infinite, and so is not a valid release
        return _of(matrix * np.float32(step), arrays)


def _of(matrix: NDArray[Any], like: Arrays) -> Packed:
    return Packed(matrix, {name: value.shape[1:] for name, value in like.items()})


@lru_cache(maxsize=16)
def _name(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    name = json.dumps(dict(shapes), separators=(",", ":"))
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"the names of the parameters are {len(name)} characters long, more than {_LONGEST_NAME}")
    return name


@lru_cache(maxsize=4)
def _columns(name: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array, in column order."""
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"its name is {len(name)} characters long")
    pairs = json.loads(name, object_pairs_hook=list)
    for _, shape in pairs:
        # Only integers that fit an array: otherwise computing with them could take very long.
        if len(shape) > _MOST_AXES or any(type(axis) is not int or not 0 <= axis < 2**40 for axis in shape):
            raise ValueError("its name has no valid shapes")
    columns = {name: tuple(shape) for name, shape in pairs}
    if not columns or len(columns) != len(pairs) or not all(type(name) is str for name in columns):
        raise ValueError("its name must name each array once")
    return columns


def _encode(value: NDArray[Any]) -> Array:
    name, header = _header(value.dtype, value.shape)
    return encoded(name, value.shape, b"".join((header, value.data if value.size else b"")))


def _decode(array: Array) -> NDArray[Any]:
    data = array.data
    if array.stype != SType.NUMPY:
        raise ValueError(f"its format is {array.stype!r}")
    # In version 1 of the format the header's length takes 2 bytes, from version 2 on 4.
    prefix = 10 if data[6:7] == b"\x01" else 12
    start = prefix + int.from_bytes(data[8:prefix], "little")
    dtype, shape, order = _parse_header(data[:start])
    flat: NDArray[Any] = np.frombuffer(data, dtype, math.prod(shape), start)
    return flat.reshape(shape, order=order)


@lru_cache(maxsize=256)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[str, bytes]:
    """Return the name of a type, and the header of an array in NumPy's format."""
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    return str(dtype), buffer.getvalue()


@lru_cache(maxsize=256)
def _parse_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]]:
    """Return type, shape and order from the header of an array in NumPy's format."""
    buffer = BytesIO(header)
    version = np.lib.format.read_magic(buffer)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, fortran, dtype = read(buffer)
    if dtype.kind not in "biufc" or min(shape, default=0) < 0:
        raise ValueError(f"it is of type {dtype} and shape {shape}")
    return dtype, shape, "F" if fortran else "C"
