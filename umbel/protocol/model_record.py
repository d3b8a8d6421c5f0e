"""One model in a Flower message, and what an app's train function made of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

from umbel.protocol.arrays import Arrays, Matrix, flatten, unflatten
from umbel.protocol.errors import ProtocolError, Refused

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class ModelRecord:
    """The only record of arrays in a message."""

    name: str  # of the record, in the message
    arrays: Arrays  # each of shape (1, ...), as in a stack of one model
    numbers: Matrix  # (1, n), all of them in the arrays' order

    @classmethod
    def of(cls, content: RecordDict) -> ModelRecord:
        """Return a message's model; raise unless it can take noise."""
        if len(content.array_records) != 1:
            raise ProtocolError("a message that asks for training has one record of arrays", code="protocol.records")
        [(name, record)] = content.array_records.items()
        if name.startswith("fitins"):
            text = "the app is a NumPyClient, or behind secaggplus_mod; umbel's Mods are for the Message API"
            raise Refused(text, code="refused.numpy-client")
        arrays = _arrays(record)
        for key, value in arrays.items():
            if value.dtype not in (np.float16, np.float32, np.float64):
                text = f"array {key!r} is of type {value.dtype}, which takes no noise"
                raise Refused(f"{text}; for BatchNorm use GroupNorm, or umbel.Gate with frozen", code="refused.arrays")
        numbers = flatten(arrays) if arrays else np.zeros((1, 0))
        if not numbers.size or not _fits(numbers):
            raise Refused("the message's arrays are empty, or not finite", code="refused.arrays")
        return cls(name, arrays, numbers)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array in the message."""
        return {key: value.shape[1:] for key, value in self.arrays.items()}

    def trained(self, reply: Message) -> Matrix:
        """Return the numbers of the same model after training, (1, n); raise if the reply has no such model."""
        [record] = reply.content.array_records.values()
        arrays = _arrays(record)
        if {key: value.shape[1:] for key, value in arrays.items()} != self.shapes:
            raise ProtocolError("training returned other arrays than came", code="protocol.arrays")
        numbers = flatten({key: arrays[key] for key in self.arrays})
        if not _fits(numbers):
            raise ProtocolError("training returned numbers that are not finite", code="protocol.arrays")
        return numbers

    def record(self, numbers: Matrix) -> ArrayRecord:
        """Return numbers (1, n) as a record of the same names, shapes and types, finite there too."""
        with np.errstate(over="ignore"):  # 16 bits hold none beyond their largest
            arrays = {key: np.nan_to_num(value[0]) for key, value in unflatten(numbers, self.arrays).items()}
        return ArrayRecord({key: Array(np.asarray(value)) for key, value in arrays.items()})


def _arrays(record: ArrayRecord) -> Arrays:
    return {key: array.numpy()[None] for key, array in record.items()}


def _fits(numbers: Matrix) -> bool:
    """Return whether all numbers are finite, in 32 bits too."""
    return bool((np.abs(numbers) <= _LARGEST).all())
