"""The ledger of a simulated node: in memory, for the time of one run."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from privacy.charges import NO_LIMITS, Charge, Limits

_RECORD = "umbel.ledger"
_UNBOUNDED = "unbounded"


class MemoryLedger:
    """What each client of a node has spent in this run; the same questions as `privacy.ledger.Ledger`.

    For each price it holds how often each client paid it, as pairs of int64 (client, times) by client.

    Parameters
    ----------
    state : RecordDict
        The node's ``context.state``, which never leaves the node.
    """

    def __init__(self, state: RecordDict) -> None:
        self._state = state
        self._record = state.config_records.get(_RECORD, ConfigRecord())

    def affordable(self, clients: Sequence[int], cost: Fraction | None, limits: Limits) -> list[bool]:
        """Return for each client whether one more charge stays within the limits."""
        if not limits.any:
            return [True] * len(clients)
        return [limits.allow(self.spent(client), self.participations(client), cost) for client in clients]

    def charge(self, charge: Charge, clients: Sequence[int], limits: Limits = NO_LIMITS) -> list[bool]:
        """Charge each client that can afford it, and return which those are."""
        affords = self.affordable(clients, charge.release.cost, limits)
        paying = [client for client, fits in zip(clients, affords, strict=True) if fits]
        key = _UNBOUNDED if charge.release.cost is None else str(charge.release.cost)
        self._record[key] = _paid_once_more(self._paid(key), np.array(paying, np.int64)).tobytes()
        self._state[_RECORD] = self._record
        return affords

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

    def _paid(self, key: str) -> NDArray[np.int64]:
        packed = self._record.get(key, b"")
        assert isinstance(packed, bytes)
        return np.frombuffer(packed, np.int64).reshape(-1, 2)

    def _times(self, key: str, client: int) -> int:
        paid = self._paid(key)
        return int(paid[paid[:, 0] == client, 1].sum())


def _paid_once_more(paid: NDArray[np.int64], paying: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return pairs (client, times) in which some clients have paid once more."""
    paying = np.unique(paying)
    place = np.searchsorted(paid[:, 0], paying)
    known = np.append(paid[:, 0], -1)[place] == paying
    paid = paid.copy()
    paid[place[known], 1] += 1
    new = paying[~known]
    return np.insert(paid, place[~known], np.stack([new, np.ones_like(new)], axis=1), axis=0) if len(new) else paid
