"""Models that an honest server would not send.

A tripwire and no more: a server that knows of it sends a model a little different from the last
and a little different from nothing, and learns as much.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from umbel.protocol.arrays import Arrays

_RECORD = "umbel.seen"
_SPREAD = 1e-6
_KEPT = 1000


def degenerate(hypotheses: Arrays) -> str:
    """Return the name of an array whose rows are all alike in some hypothesis, as zeros are; or nothing.

    Arrays of one row, and of one axis, as biases are, may be constant.
    """
    for name, value in hypotheses.items():
        if (
            value.ndim > 2
            and value.shape[1] > 1
            and (np.ptp(value, axis=1).max(axis=tuple(range(1, value.ndim - 1))) <= _SPREAD).any()
        ):
            return name
    return ""


def repeated(hypotheses: Arrays, state: RecordDict) -> bool:
    """Return whether the node was sent the very same before, and remember it in the node's state."""
    digest = hashlib.sha256(
        b"".join(np.ascontiguousarray(value).tobytes() for value in hypotheses.values())
    ).hexdigest()
    record = state.config_records.get(_RECORD, ConfigRecord())
    kept: Any = record.get("digests", [])
    seen: list[str] = list(kept)
    state[_RECORD] = ConfigRecord({"digests": [*seen, digest][-_KEPT:]})
    return digest in seen
