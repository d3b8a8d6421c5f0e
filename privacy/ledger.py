"""What each client has spent: participations times n / nu, exactly."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
from flwr.app import ConfigRecord, RecordDict

_RECORD = "umbel.ledger"
_UNBOUNDED = "unbounded"


class StateLedger:
    """A ledger in the node's memory, for the time of one run.

    For each price it holds how often each client paid it, as pairs of int64 (client, times).

    Parameters
    ----------
    state : RecordDict
        The node's ``context.state``, which never leaves the node.
    """

    def __init__(self, state: RecordDict) -> None:
        if _RECORD not in state:
            state[_RECORD] = ConfigRecord()
        self._record: ConfigRecord = state[_RECORD]  # type: ignore[assignment]

    def charge(self, clients: Iterable[int], cost: Fraction | None) -> None:
        """Charge each client once; a client may be any whole number."""
        key = _UNBOUNDED if cost is None else str(cost)
        paid = self._paid(key)
        both, where = np.unique(np.concatenate([paid[:, 0], np.fromiter(clients, np.int64)]), return_inverse=True)
        times = np.bincount(where[: len(paid)], weights=paid[:, 1], minlength=len(both)).astype(np.int64)
        times += np.bincount(where[len(paid) :], minlength=len(both))
        self._record[key] = np.stack([both, times], axis=1).tobytes()

    def participations(self, client: int) -> int:
        """Return how often a client was charged."""
        return sum(self._times(key, client) for key in self._record)

    def spent(self, client: int) -> Fraction | float:
        """Return the sum of a client's charges; infinite after an unsanitised release."""
        total = Fraction(0)
        for key in self._record:
            times = self._times(key, client)
            if key == _UNBOUNDED and times:
                return float("inf")
            if times:
                total += Fraction(key) * times
        return total

    def _paid(self, key: str) -> np.ndarray:
        packed = self._record.get(key, b"")
        assert isinstance(packed, bytes)
        return np.frombuffer(packed, np.int64).reshape(-1, 2)

    def _times(self, key: str, client: int) -> int:
        paid = self._paid(key)
        return int(paid[paid[:, 0] == client, 1].sum())
