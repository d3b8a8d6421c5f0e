"""What a hostile server may send: one corpus, which tests drive through parse, gate and Mod.

`tests/protocol` reads each of them, `tests/privacy/site/test_gate.py` sends some to umbel's own clients,
`test_fuzz.py` there any, and `tests/mods/test_gate_hostile.py` the arrays to an ordinary Flower app. Each must be
refused before anybody trains or pays.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from umbel.protocol.messages import round_request
from umbel.protocol.records import pack
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

from .tasks import EVALUATION, TRAINING

# --- tasks: the kind, a field, and a value that it cannot have; MISSING takes the field out

MISSING = object()
KINDS: dict[str, TrainingSpec | EvaluationSpec] = {"training": TRAINING, "evaluation": EVALUATION}
_EITHER: dict[str, list[Any]] = {
    "round": [3.0, True, -1, 2**63 - 1],
    "clients": [4, "all", b"\x00\x02", [], [0.0, 1.0], ["0"], [True], [1, 1], [0, -1]],
    "step_size": ["0.1", True, 0.0, -0.1, math.nan, math.inf],
    "run": [7, ["a"], "r" * 201],
    "frozen_digest": [b"00", "0" * 201],
}
_TRAINING: dict[str, list[Any]] = {
    "round": [0],
    "local_epochs": ["1", -1, 2**63 - 1],
    "local_steps": [True, -1, 2**63 - 1],
    "batch_size": [10.0, -1, 2**63 - 1],
    "noise_multiplier": ["5", [5.0], -5.0, math.nan, math.inf],
    "clipping": [1, "secret"],
    "clip_norm": [0.0, math.nan],
    "choice_epsilon": [31.0],
    "message_noise": [-1.0],
    "noise_per": ["parameter"],
    "disclose_choice": ["no", 0, 1],
}
TASKS: list[tuple[str, str, Any]] = [
    *((kind, field, value) for kind in KINDS for field, values in _EITHER.items() for value in values),
    *(("training", field, value) for field, values in _TRAINING.items() for value in values),
    *((kind, field, MISSING) for kind, task in KINDS.items() for field in task.to_record()),
]


def spoilt_task(kind: str, field: str, value: Any, **entries: Any) -> ConfigRecord:
    """Return the record of a task, of which one field is another, and entries of one's own."""
    record: dict[str, Any] = {**KINDS[kind].to_record(), **entries, field: value}
    return ConfigRecord({name: one for name, one in record.items() if one is not MISSING})


def spoilt_round(kind: str, field: str, value: Any, hypotheses: Any, **entries: Any) -> RecordDict:
    """Return the content of a round's message that asks for such a task alone."""
    content = round_request(pack(hypotheses))
    content[kind] = spoilt_task(kind, field, value, **entries)
    return content


# --- arrays


def npy(value: Any, **options: Any) -> bytes:
    """Return the bytes of an array as NumPy writes them."""
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(value), **options)
    return buffer.getvalue()


def header(text: str, data: bytes = bytes(8), version: bytes = b"\x01\x00") -> bytes:
    """Return what says of itself that it is such an array, and has this data."""
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text.encode() + data


def raw(data: bytes, stype: str = "numpy.ndarray") -> Array:
    """Return two numbers of 32 bits, as a message says, whose bytes are others."""
    return Array("float32", (2,), stype, data)


def _described(descr: str, shape: str = "(2,)", rest: str = "'fortran_order': False, ") -> Array:
    return raw(header(f"{{'descr': {descr}, {rest}'shape': {shape}, }}", bytes(1 << 10)))


UNREADABLE: dict[str, Array] = {
    "no bytes": raw(b""),
    "the first bytes of an array": raw(b"\x93NUMPY"),
    "text": raw(b"not an array at all"),
    "a pickle": raw(pickle.dumps([1.0, 2.0])),
    "objects": raw(npy(np.array(["diagnosis-of-patient-17", None], object), allow_pickle=True)),
    "objects without a pickle": raw(header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}")),
    "an array cut short": raw(npy([1.0, 2.0])[:-5]),
    "fewer numbers than it says": raw(header("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}")),
    "more numbers than there is memory": raw(
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 1000000)}")
    ),
    "a negative shape": raw(header("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}")),
    "a header without an end": raw(header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)")),
    "a header without an order": raw(header("{'descr': '<f4', 'shape': (2,)}")),
    "a version that there is not": raw(
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", version=b"\x09\x00")
    ),
    "another format": raw(npy(np.zeros(2, np.float32)), stype="safetensors"),
    # NumPy counts the sizes of such types in 32 bits, and a field may then lie outside of the message: whoever reads
    # this one by Flower's `Array.numpy` ends the process.
    "fields": _described("[('w', '<f4', (1, 2)), ('b', '<f4', (1,))]"),
    "fields with gaps": _described("{'names': ['w'], 'formats': ['(1,2)f4'], 'offsets': [4], 'itemsize': 12}"),
    "fields outside": _described("('<V8',{'names':['w'],'formats':['(1,2)f4'],'offsets':[2147483643],'itemsize':8})"),
    "arrays of arrays": _described("('<f4', (3,))"),
}
"""Bytes that are no array."""

NO_MODEL: dict[str, Array] = {
    name: Array(value)
    for name, value in {
        "NaN": np.array([np.nan, 0], np.float32),
        "infinity": np.array([0, -np.inf], np.float32),
        "infinity of 16 bits": np.array([np.inf, 0], np.float16),
        "no number of 32 bits": np.array([1e300, 0]),
        "whole numbers": np.array([1, 2]),
        "truth values": np.array([True, False]),
        "complex numbers": np.array([1j, 2j]),
        "numbers of 80 bits": np.array([1, 2], np.longdouble),
        "words": np.array(["a", "b"]),
    }.items()
}
"""Arrays that can be read, and that no model has."""


def matrix(array: Array) -> ArrayRecord:
    """Return an array of two numbers, or what stands for it, as the packed hypotheses of one model."""
    if array in UNREADABLE.values():
        return ArrayRecord({'{"weight":[2]}': array})
    return ArrayRecord({'{"weight":[2]}': Array(array.numpy().reshape(1, 2))})
