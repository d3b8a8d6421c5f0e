"""The hypotheses that a site accepts from a server, and a tripwire for those that an honest server would not send.

It is only a tripwire: a server that knows it can send a model that differs slightly from the last one and from a
constant, and learns as much.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from umbel.privacy.gate.policy import Policy
from umbel.protocol.arrays import Arrays, all_finite, as_matrix
from umbel.protocol.errors import Refused

_RECORD = "umbel.seen"
_SPREAD = 1e-6
_KEPT = 1000


def check_hypotheses(hypotheses: Arrays, policy: Policy) -> None:
    """Raise `Refused` unless these are finite float32 arrays with one common leading axis, of at most the site's k.

    Those without numbers would have no price, and people could not be told one.
    """
    if fault := _fault(hypotheses, policy):
        raise Refused(f"the hypotheses {fault}", code="refused.hypotheses")


def _fault(hypotheses: Arrays, policy: Policy) -> str:
    counts = {value.shape[0] if value.ndim else 0 for value in hypotheses.values()}
    if len(counts) != 1 or not 1 <= min(counts) <= policy.max_hypotheses:
        return f"are not 1 to {policy.max_hypotheses} stacked arrays of one length"
    for name, value in hypotheses.items():
        if value.dtype != np.float32:
            return f"{name!r} are {value.dtype}, not float32"
    if not any(value.size for value in hypotheses.values()):
        return "have no numbers"
    if all_finite(as_matrix(hypotheses)):
        return ""
    return f"{', '.join(repr(name) for name, value in hypotheses.items() if not all_finite(value))} are not finite"


def check_honest(hypotheses: Arrays, state: RecordDict) -> None:
    """Raise `Refused` for hypotheses that an honest server would not send; remember them in the node's state."""
    if name := degenerate(hypotheses):
        raise Refused(
            f"all rows of hypotheses {name!r} are alike; no honest server sends them", code="refused.tripwire"
        )
    if repeated(hypotheses, state):
        raise Refused("the server sent the same hypotheses before", code="refused.tripwire")


def degenerate(hypotheses: Arrays) -> str:
    """Return the name of an array with equal rows in some hypothesis, such as zeros; or empty.

    Arrays with one row or one axis, such as biases, may be constant.
    """
    for name, value in hypotheses.items():
        if value.ndim > 2 and value.shape[1] > 1:
            spread = np.ptp(value, axis=1).max(axis=tuple(range(1, value.ndim - 1)))
            if (spread <= _SPREAD).any():
                return name
    return ""


def repeated(hypotheses: Arrays, state: RecordDict) -> bool:
    """Return whether the node received the very same hypotheses before, and remember them in the node's state."""
    digest = hashlib.sha256(b"".join(value.tobytes() for value in hypotheses.values())).hexdigest()
    kept: Any = state.config_records.get(_RECORD, ConfigRecord()).get("digests", [])
    seen: list[str] = list(kept)
    state[_RECORD] = ConfigRecord({"digests": [*seen, digest][-_KEPT:]})
    return digest in seen
