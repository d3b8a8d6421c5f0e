"""A site's ledger: a row for each charge in the site's store, on disk before any noise is drawn.

``releases`` has each sort of release that was ever made, with a number. ``charges`` has a row for each charge, with
the SHA-256 of the row before and of its own content. ``totals`` says how often each client paid for each sort, and
with which charge that began. ``head`` has one row: the number of charges, the hash of the last charge, and the hash
of all releases and totals. All change in one transaction, so a ledger with a part that was changed, lost or restored
does not fit together, and is refused. There is no key: this finds damage, and no forger.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from umbel.privacy.gate.charges import NO_LIMITS, Account, Charge, Limits, read, written
from umbel.privacy.gate.store import Store, digest_of_totals
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.release import Release

# A ledger of so many charges is checked from the first on in some 50 ms. Each message opens it.
_WHOLE = 10_000
_TAIL = 2_000  # of a longer one, so many of the last

_Totals = dict[ClientInDataset, dict[int, tuple[int, int]]]


@dataclass(frozen=True)
class _Books:
    """A ledger as it stands: how many charges there are, the hash of the last, and what was ever released, by number.

    `totals` has for each client, by the number of what it released, in the order in which that began: the first charge
    for it, and how many there are.
    """

    charges: int = 0
    hash: bytes = bytes(32)
    releases: Mapping[int, str] = field(default_factory=dict)
    totals: Mapping[ClientInDataset, Mapping[int, tuple[int, int]]] = field(default_factory=dict)

    def account(self, client: ClientInDataset) -> dict[Release, int]:
        """Return what a client has released."""
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

    Opening it checks that it fits together: SQLite's own ``integrity_check``, the chain of hashes from
    the first charge on, and that the totals are the sums of the charges. Of a ledger with more than
    10,000 charges the last 2,000 are checked, and the totals, from which limits are computed. Later charges
    are checked when they are read.

    Parameters
    ----------
    path : Path
    whole : bool
        Check every charge, however many there are, and the rest of the store.

    Raises
    ------
    LedgerError
        When the file is not a store, or damaged; see `umbel.privacy.gate.store.Store`.
    """

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        super().__init__(path)
        self._whole, self._known = whole, _Books()
        with self._transaction() as connection:
            self._check(connection)
            self._read(connection)

    def charge(
        self, charge: Charge, clients: Sequence[ClientInDataset], limits: Limits = NO_LIMITS, at_least: int = 1
    ) -> list[bool]:
        """Charge each client that can pay, all at once, and return which those are; none if fewer than `at_least` can.

        Asking and charging are one transaction, so that processes that share the ledger cannot
        together exceed the limits. On return the charges are on disk.
        """
        with self._transaction(write=True) as connection:
            books = self._read(connection)
            paying = limits.paying(clients, books.account, charge.release, at_least)
            if any(paying):
                paid = [client for client, pays in zip(clients, paying, strict=True) if pays]
                self._known = _append(connection, books, charge, paid)
        return paying

    def able(self, release: Release, clients: Sequence[ClientInDataset], limits: Limits) -> list[bool]:
        """Return for each client whether it could pay; none is charged."""
        with self._transaction() as connection:
            return limits.paying(clients, self._read(connection).account, release)

    def accounts(self) -> dict[ClientInDataset, Account]:
        """Return what every client has released, by client."""
        with self._transaction() as connection:
            books = self._read(connection)
            return {client: books.account(client) for client in sorted(books.totals)}

    def account(self, client: ClientInDataset) -> Account:
        """Return what a client has released."""
        with self._transaction() as connection:
            return self._read(connection).account(client)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every charge, oldest first."""
        with self._transaction() as connection:
            releases = self._read(connection).releases
            rows = connection.execute("SELECT at, run, round, client, release, clip_norm FROM charges ORDER BY id")
            for at, run, round, client, release, clip_norm in rows:
                what = {key: value for key, value in asdict(read(releases[release])).items() if key != "radius"}
                yield {"at": at, "run": run, "round": round, "client": client, **what, "clip_norm": clip_norm}

    def _check(self, connection: sqlite3.Connection) -> None:
        """Raise unless the tables are a store's, and SQLite itself finds nothing wrong with the file."""
        self._check_schema(connection)
        if self._whole:
            self._check_integrity(connection)
            return
        [[charges]] = connection.execute("SELECT COALESCE(MAX(charges), 0) FROM head")
        self._check_integrity(connection, "releases", "totals", "head", *(["charges"] if charges <= _WHOLE else []))

    def _read(self, connection: sqlite3.Connection) -> _Books:
        """Return how the ledger stands; raise unless what came since it was last read fits together."""
        heads = connection.execute("SELECT charges, hash, totals FROM head").fetchall()
        if len(heads) != 1:
            raise self._damaged("it does not say how many charges it has")
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
            raise self._damaged("the totals are not as they were written")
        from_the_first = number == 0
        counted: _Totals = defaultdict(dict)
        for id, own, at, run, round, client, release, clip_norm in connection.execute(
            "SELECT id, hash, at, run, round, client, release, clip_norm FROM charges WHERE id > ? ORDER BY id",
            (number,),
        ):
            number, hash = number + 1, _hash(hash, at, run, round, client, releases[release], clip_norm)
            if (id, own) != (number, hash):
                raise self._damaged(f"charge {number} is not as it was written")
            first, often = counted[client].get(release, (number, 0))
            counted[client][release] = first, often + 1
        if number != charges:
            raise self._damaged(f"it has {number} of {charges} charges")
        if hash != last:
            raise self._damaged("its last charge is not the one that was written")
        by_client: _Totals = defaultdict(dict)
        for client, first, release, often in totals:
            by_client[client][release] = first, often
        if from_the_first and counted != by_client:
            raise self._damaged("the totals are not the sums of the charges")
        self._known = _Books(charges, last, releases, dict(by_client))
        return self._known


def _hash(before: bytes, *content: Any) -> bytes:
    """Return the hash of a charge: of the hash of the one before it, and its content as Python writes a tuple."""
    return sha256(before + repr(content).encode()).digest()


def _append(connection: sqlite3.Connection, books: _Books, charge: Charge, clients: list[ClientInDataset]) -> _Books:
    """Write a charge of each client; return how the ledger then stands."""
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
