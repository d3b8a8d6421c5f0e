"""The hypotheses that a site accepts from a server."""

from __future__ import annotations

import numpy as np

from umbel.privacy.gate.policy import Policy
from umbel.protocol.arrays import Arrays, all_finite, as_matrix
from umbel.protocol.errors import Refused


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
