"""Frames between an audit and its worker: JSON and arrays, without pickles."""

from __future__ import annotations

import io
import json
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

_HEADER = "_header"
_LENGTH = 8  # bytes that hold the length of a frame


def send(stream: BinaryIO, header: dict[str, Any], arrays: Arrays) -> None:
    """Write one frame."""
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(buffer, **{_HEADER: text}, **arrays)  # type: ignore[arg-type]
    data = buffer.getvalue()
    stream.write(len(data).to_bytes(_LENGTH, "big") + data)
    stream.flush()


def receive(stream: BinaryIO) -> tuple[dict[str, Any], Arrays] | None:
    """Return the next frame; None at the end of the stream."""
    length = stream.read(_LENGTH)
    if len(length) < _LENGTH:
        return None
    with np.load(io.BytesIO(stream.read(int.from_bytes(length, "big"))), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    header: dict[str, Any] = json.loads(arrays.pop(_HEADER).tobytes())
    return header, arrays
