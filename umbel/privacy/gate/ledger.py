"""A site's ledger: a row for each charge in the site's store, written to disk before any noise is drawn.

``releases`` numbers each sort of release ever made. ``charges`` has a row for each charge, with the SHA-256 of the
previous row and of the row's content. ``totals`` says how often each client was charged for each sort, and with which
charge that began. ``head`` has one row: the number of charges, the hash of the last charge, and the hash of all
releases and totals. All change in one transaction. So if a part of a ledger was changed, lost or restored, the parts do
not match, and the ledger is refused. There is no key: this detects damage, but no forger.
"""

from __future__ import annotations

import math
import os
import sqlite3
import tempfile
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from umbel.privacy.gate.charges import NO_LIMITS, OF_ROWS, Account, Charge, Limits, read, written
from umbel.privacy.gate.store import Store, digest_of_totals
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import LedgerError
from umbel.protocol.flower import filled
from umbel.protocol.home import sync
from umbel.protocol.plugins import distrust
from umbel.protocol.release import Release

# Checking a ledger of this many charges completely takes some 50 ms. Each message opens the ledger.
_WHOLE = 10_000
_TAIL = 2_000  # number of last charges that are checked in a longer one

_Totals = dict[ClientInDataset, dict[int, tuple[int, int]]]


@dataclass(frozen=True)
class _Books:
    """The state of a ledger: the number of charges, the hash of the last one, and the numbered releases.

    `totals` has for each client and each number of a release, in the order of their first charge, that charge and how
    many there are.
    """

    charges: int = 0
    hash: bytes = bytes(32)
    releases: Mapping[int, str] = field(default_factory=dict)
    totals: Mapping[ClientInDataset, Mapping[int, tuple[int, int]]] = field(default_factory=dict)

    def account(self, client: ClientInDataset) -> dict[Release, int]:
        """Return the releases of a client."""
        account: Counter[Release] = Counter()
        for number, (_, times) in self.totals.get(client, {}).items():
            account[read(self.releases[number])] += times
        return dict(account)

    @property
    def digest(self) -> bytes:
        """The hash of all releases and totals."""
        totals = [(client, self.totals[client]) for client in sorted(self.totals)]
        rows = [(client, first, number, times) for client, own in totals for number, (first, times) in own.items()]
        return digest_of_totals(list(self.releases.items()), rows)


class Ledger(Store):
    """An open ledger.

    Opening it checks that its parts match: SQLite's own ``integrity_check``, the chain of hashes from the first charge
    on, and that the totals are the sums of the charges. If a ledger has more than 10,000 charges, only the last 2,000
    are checked, and the totals, from which limits are computed. Later charges are checked when they are read.

    Parameters
    ----------
    path : Path
    whole : bool
        Check every charge, however many there are, and the rest of the store.

    Raises
    ------
    LedgerError
        If the file is not a store, or is damaged; see `umbel.privacy.gate.store.Store`.
    """

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        super().__init__(path)
        self._whole, self._known = whole, _Books()
        with self._transaction() as connection:
            self._check(connection)
            self._read(connection)

    def distrust(self, named: str = "") -> Self:
        """Let mechanisms of releases run no code that the ledger alone names: somebody may have sent it.

        `named` are those that the site names itself, separated by spaces.
        """
        distrust(*{read(text).mechanism for text in self._known.releases.values()} - {*named.split()})
        return self

    def charge(
        self,
        charge: Charge,
        clients: Sequence[ClientInDataset],
        limits: Limits = NO_LIMITS,
        at_least: int = 1,
        most: float = math.inf,
    ) -> list[bool]:
        """Charge all clients within their limits at once, and return these; none if there are fewer than `at_least`.

        A client with `most` releases of this kind in this run is over its limits.

        Check and charge are one transaction, so that processes that share the ledger cannot exceed the limits together.
        On return the charges are on disk.
        """
        with self._transaction(write=True) as connection:
            books = self._read(connection)
            often = _taken(connection, books, charge) if most < math.inf else {}
            able = [client for client in clients if often.get(client, 0) < most]
            pays = dict(zip(able, limits.paying(able, books.account, charge.release, at_least), strict=True))
            paying = [pays.get(client, False) for client in clients]
            if paid := [client for client, pays in zip(clients, paying, strict=True) if pays]:
                books = _append(connection, books, charge, paid)
        self._known = books  # now that it is on disk
        return paying

    def able(self, release: Release, clients: Sequence[ClientInDataset], limits: Limits) -> list[bool]:
        """Return for each client whether it is within its limits; none is charged."""
        with self._transaction() as connection:
            return limits.paying(clients, self._read(connection).account, release)

    def accounts(self) -> dict[ClientInDataset, Account]:
        """Return the releases of every client, by client."""
        with self._transaction() as connection:
            books = self._read(connection)
            return {client: books.account(client) for client in sorted(books.totals)}

    def account(self, client: ClientInDataset) -> Account:
        """Return the releases of a client."""
        with self._transaction() as connection:
            return self._read(connection).account(client)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every charge, oldest first."""
        with self._transaction() as connection:
            books = self._read(connection)
            known = {number: read(text) for number, text in books.releases.items()}
        # A table has the same columns in each row.
        left_out = {"radius", *(() if any(one.by_rows for one in known.values()) else OF_ROWS)}
        for row in islice(self.table("charges"), books.charges):
            if row["release"] not in known:
                raise self._damaged(f"charge {row['id']} has been changed")
            what = {key: value for key, value in asdict(known[row["release"]]).items() if key not in left_out}
            told = {key: row[key] for key in ("at", "run", "round", "client")}
            yield told | what | {"clip_norm": row["clip_norm"]}

    def copy_to(self, path: Path) -> None:
        """Copy the whole store to a new file in one step, also while others use it; the copy is checked first."""
        try:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
            os.close(handle)
            scratch = Path(name)
            try:
                with self._transaction() as connection, closing(sqlite3.connect(scratch)) as copy:
                    try:
                        copy.execute("PRAGMA synchronous = EXTRA")
                        connection.backup(copy)
                    except sqlite3.Error as error:
                        raise OSError(error) from None
                Ledger(scratch, whole=True)
                os.link(scratch, path)  # unlike a rename, this never replaces a file
                sync(path.parent)
            finally:
                scratch.unlink(missing_ok=True)
        except FileExistsError:
            raise LedgerError(f"{path} exists already; name another file", code="ledger.exists") from None
        except OSError as error:
            raise LedgerError(f"the copy {path} cannot be made: {error}", code="ledger.no-copy") from error

    def _check(self, connection: sqlite3.Connection) -> None:
        """Raise unless the tables are a store's, and SQLite itself finds no fault in the file."""
        self._check_schema(connection)
        if self._whole:
            self._check_integrity(connection)
            return
        [[charges]] = connection.execute("SELECT COALESCE(MAX(charges), 0) FROM head")
        self._check_integrity(connection, "releases", "totals", "head", *(["charges"] if charges <= _WHOLE else []))

    def _read(self, connection: sqlite3.Connection) -> _Books:
        """Return the state of the ledger; raise unless the rows since the last reading match."""
        heads = connection.execute("SELECT charges, hash, totals FROM head").fetchall()
        if len(heads) != 1:
            raise self._damaged("its number of charges is missing")
        [(charges, last, digest)] = heads
        number, hash = self._known.charges, self._known.hash
        if charges < number:
            raise self._damaged(f"it had {number} charges, and has {charges}")
        if charges - number > _WHOLE and not self._whole:
            number = charges - _TAIL
            [(hash,)] = connection.execute("SELECT hash FROM charges WHERE id = ?", (number,)).fetchall()
        releases = dict(connection.execute("SELECT id, what FROM releases ORDER BY id").fetchall())
        totals = connection.execute("SELECT client, first, release, times FROM totals ORDER BY 1, 2").fetchall()
        if digest_of_totals(list(releases.items()), totals) != digest:
            raise self._damaged("the totals have been changed")
        from_the_first = number == 0
        counted: _Totals = defaultdict(dict)
        for id, own, at, run, round, client, release, clip_norm in connection.execute(
            "SELECT id, hash, at, run, round, client, release, clip_norm FROM charges WHERE id > ? ORDER BY id",
            (number,),
        ):
            number, hash = number + 1, _hash(hash, at, run, round, client, releases[release], clip_norm)
            if (id, own) != (number, hash):
                raise self._damaged(f"charge {number} has been changed")
            first, often = counted[client].get(release, (number, 0))
            counted[client][release] = first, often + 1
        if number != charges:
            raise self._damaged(f"it has {number} of {charges} charges")
        if hash != last:
            raise self._damaged("its last charge has been changed")
        by_client: _Totals = defaultdict(dict)
        for client, first, release, often in totals:
            by_client[client][release] = first, often
        if from_the_first and counted != by_client:
            raise self._damaged("the totals are not the sums of the charges")
        self._known = _Books(charges, last, releases, dict(by_client))
        return self._known


def _taken(connection: sqlite3.Connection, books: _Books, charge: Charge) -> dict[ClientInDataset, int]:
    """Return how often each client has made releases of a charge's kind in its run."""
    kinds = [number for number, what in books.releases.items() if read(what).kind is charge.release.kind]
    marks = ", ".join("?" * len(kinds))
    sql = f"SELECT client, count(*) FROM charges WHERE run = ? AND release IN ({marks}) GROUP BY client"
    return dict(connection.execute(sql, (charge.run, *kinds)).fetchall())


def _hash(before: bytes, *content: Any) -> bytes:
    """Return the hash of a charge: of the previous charge's hash, and of its content as a Python tuple in text."""
    return sha256(before + repr(content).encode()).digest()


def _append(connection: sqlite3.Connection, books: _Books, charge: Charge, clients: list[ClientInDataset]) -> _Books:
    """Write a charge of each client; return the new state of the ledger."""
    at, what, clip_norm = datetime.now(UTC).isoformat("T", "seconds"), written(charge.release), charge.release.radius
    number, hash, releases, totals = books.charges, books.hash, dict(books.releases), dict(books.totals)
    release = next((known for known, text in releases.items() if text == what), len(releases) + 1)
    if release not in releases:
        releases[release] = what
        connection.execute("INSERT INTO releases VALUES (?, ?)", (release, what))
    rows = []
    for client in clients:
        number, hash = number + 1, _hash(hash, at, charge.run, charge.round, client, what, clip_norm)
        rows.append((number, at, charge.run, charge.round, client, release, clip_norm, hash))
        first, times = totals.get(client, {}).get(release, (number, 0))
        totals[client] = {**totals.get(client, {}), release: (first, times + 1)}
    changed = [(client, first, release, times) for client in {*clients} for first, times in [totals[client][release]]]
    connection.executemany("INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    connection.executemany("INSERT OR REPLACE INTO totals VALUES (?, ?, ?, ?)", changed)
    after = _Books(number, hash, releases, totals)
    connection.execute("INSERT OR REPLACE INTO head VALUES (1, ?, ?, ?)", (number, hash, after.digest))
    return after


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
