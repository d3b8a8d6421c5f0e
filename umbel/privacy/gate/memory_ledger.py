"""The ledger of a simulated node: in memory, for one run."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from umbel.privacy.gate.charges import NO_LIMITS, Account, Charge, Limits, read, written
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.flower import filled
from umbel.protocol.release import Release

_RECORD = "umbel.ledger"


class MemoryLedger:
    """The releases of each of a node's clients in this run; with the interface of `umbel.privacy.gate.ledger.Ledger`.

    It lies in the node's ``context.state``, which never leaves the node. For each kind of release it holds how often
    each client was charged, as pairs of int64 (client, times), sorted by client.
    """

    def __init__(self, state: RecordDict) -> None:
        self._state = state
        record = state.get(_RECORD)  # `RecordDict.config_records` makes a new dictionary of all records each time
        self._record = record if isinstance(record, ConfigRecord) else ConfigRecord()

    def charge(
        self,
        charge: Charge,
        clients: Sequence[ClientInDataset],
        limits: Limits = NO_LIMITS,
        at_least: int = 1,
        most: float = math.inf,
    ) -> list[bool]:
        """Charge all clients within their limits, and return these; none if there are fewer than `at_least`.

        `most` is infinite: only the people of a real site approve a run.
        """
        paying = limits.paying(clients, self.account, charge.release, at_least)
        paid = np.array(clients, np.int64)[paying]
        key = written(charge.release)
        filled(self._record, {key: _paid_once_more(self._paid(key), paid).tobytes()})
        filled(self._state, {_RECORD: self._record})
        return paying

    def able(self, release: Release, clients: Sequence[ClientInDataset], limits: Limits) -> list[bool]:
        """Return for each client whether it is within its limits; none is charged."""
        return limits.paying(clients, self.account, release)

    def account(self, client: ClientInDataset) -> Account:
        """Return the releases of a client."""
        times = {key: self._times(key, client) for key in self._record}
        return {read(key): often for key, often in times.items() if often}

    def _paid(self, key: str) -> NDArray[np.int64]:
        packed = self._record.get(key, b"")
        assert isinstance(packed, bytes)
        return np.frombuffer(packed, np.int64).reshape(-1, 2)

    def _times(self, key: str, client: int) -> int:
        clients, times = self._paid(key).T
        place = bisect_left(clients, client)  # NumPy's search would first copy the clients, perhaps a million
        return int(times[place]) if place < len(clients) and clients[place] == client else 0


def _paid_once_more(paid: NDArray[np.int64], paying: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return pairs (client, times) after one more charge of some clients."""
    paying = paying if (paying[1:] > paying[:-1]).all() else np.unique(paying)
    clients, times = paid.T.copy()
    place = clients.searchsorted(paying)
    known = place < len(clients)
    known[known] = clients[place[known]] == paying[known]
    times[place[known]] += 1
    new = paying[~known]
    rows = place[~known] + np.arange(len(new))
    old = np.ones(len(paid) + len(new), bool)
    old[rows] = False
    following = np.empty((len(old), 2), np.int64)
    following[rows, 0], following[rows, 1] = new, 1
    following[old, 0], following[old, 1] = clients, times
    return following
