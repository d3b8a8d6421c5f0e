"""A site's ledger: one SQLite file, a row a charge, durable before any noise is drawn.

Four tables hold it. ``releases`` has what was ever released, each with a number. ``charges`` has a row a
charge, each with the SHA-256 of the row before and of its own content. ``totals`` has how often each client
paid for what, and with which charge that began. ``head`` has one row: the number of charges, the
hash of the last, and that of all releases and totals. All change in one transaction, so that a ledger of which
a part was changed, lost or brought back does not fit together, and is refused. There is no key in it: this
finds damage, and no forger.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from umbel.privacy.gate import database
from umbel.privacy.gate.charges import NO_LIMITS, Account, Charge, Limits, read, written
from umbel.protocol.errors import LedgerError
from umbel.protocol.release import Clipping, Kind, Release

_APPLICATION = 0x554D424C  # "UMBL"
_VERSION = 3
# Versions that are still read: without hashes, and with the price in every charge.
_BEFORE_THE_CHAIN, _BEFORE_RELEASES = 1, 2
_SCHEMA = (
    "CREATE TABLE releases (id INTEGER PRIMARY KEY, what TEXT NOT NULL) STRICT",
    """CREATE TABLE charges (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    client INTEGER NOT NULL,
    release INTEGER NOT NULL,
    radius REAL,
    hash BLOB NOT NULL
) STRICT""",
    "CREATE TABLE totals (client INTEGER NOT NULL, first INTEGER NOT NULL, release INTEGER NOT NULL, "
    "times INTEGER NOT NULL, PRIMARY KEY (client, first)) STRICT, WITHOUT ROWID",
    "CREATE TABLE head (id INTEGER PRIMARY KEY, charges INTEGER NOT NULL, hash BLOB NOT NULL, totals BLOB NOT NULL)"
    " STRICT",
)
_COLUMNS = "at, run, round, client, release, radius"
_OLD_COLUMNS = "at, run, round, client, kind, n, noise_multiplier, clipping, radius"
_OLD_TABLES = {_BEFORE_THE_CHAIN: ["by_client", "charges"], _BEFORE_RELEASES: ["charges", "head", "totals"]}

# A ledger of so many charges is checked from the first on in some 50 ms. Each message opens it.
_WHOLE = 10_000
_TAIL = 2_000  # of a longer one, so many of the last

_FAULTS = (ArithmeticError, LookupError, MemoryError, TypeError, ValueError)  # what Python makes of odd values

_Row = tuple[Any, ...]
_Totals = dict[int, dict[int, tuple[int, int]]]


@dataclass(frozen=True)
class _Entry:
    """A charge, but for its place in the chain."""

    at: str
    run: str
    round: int
    client: int
    what: str
    radius: float | None

    def hash(self, before: bytes) -> bytes:
        """Return the hash of the charge: that of the one before it, and its content as Python writes a tuple."""
        content = (self.at, self.run, self.round, self.client, self.what, self.radius)
        return sha256(before + repr(content).encode()).digest()


@dataclass(frozen=True)
class _Books:
    """A ledger as it stands.

    Attributes
    ----------
    charges : int
    hash : bytes
        Of the last.
    releases : dict from int to str
        What was ever released, by number.
    totals : dict from int to dict from int to (int, int)
        For each client, by the number of what it released, in the order in which that began: the first
        charge for it, and how many there are.
    """

    charges: int = 0
    hash: bytes = bytes(32)
    releases: Mapping[int, str] = field(default_factory=dict)
    totals: Mapping[int, Mapping[int, tuple[int, int]]] = field(default_factory=dict)

    def account(self, client: int) -> dict[Release, int]:
        """Return what a client has released."""
        account: dict[Release, int] = {}
        for number, (_, times) in self.totals.get(client, {}).items():
            release = read(self.releases[number])
            account[release] = account.get(release, 0) + times
        return account

    def affordable(self, clients: Sequence[int], release: Release, limits: Limits) -> list[bool]:
        """Return for each client whether one more release stays within the limits."""
        if not limits.any:
            return [True] * len(clients)
        allowed: dict[tuple[tuple[Release, int], ...], bool] = {}  # many clients have released the same
        affords = []
        for client in clients:
            account = self.account(client)
            key = tuple(account.items())
            if key not in allowed:
                allowed[key] = limits.allow(account, release)
            affords.append(allowed[key])
        return affords

    @property
    def digest(self) -> bytes:
        """The hash of all releases and totals."""
        rows = [
            (client, first, release, times)
            for client in sorted(self.totals)
            for release, (first, times) in self.totals[client].items()
        ]
        return _digest(list(self.releases.items()), rows)


class Ledger:
    """An open ledger.

    Opening it checks that it fits together: SQLite's own ``integrity_check``, the chain of hashes from
    the first charge on, and that the totals are the sums of the charges. Of a ledger with more than
    10,000 charges the last 2,000 are checked, and the totals, from which limits are computed. What
    comes later is checked as it is read.

    Parameters
    ----------
    path : Path
        A ledger that is there; see `create`.
    nodes : int
        Where the dataset's clients are dealt out to so many nodes, by whose own numbers an older
        umbel charged: one charge there may be any of so many clients', and counts for each of them.
    whole : bool
        Check every charge, however many there are.

    Raises
    ------
    LedgerError
        When the file is not a ledger, or damaged. It is left as it is: a site that lost its
        ledger must decide itself what its clients have spent.
    """

    def __init__(self, path: Path, *, nodes: int = 1, whole: bool = False) -> None:
        self.path = path
        self._nodes, self._whole = nodes, whole
        self._known = _Books()
        try:
            _check_header(path)
        except OSError as error:
            raise LedgerError(f"the ledger {path} cannot be opened: {error}") from error
        with self._transaction() as connection:
            self._check(connection)
            self._read(connection)

    @classmethod
    def create(cls, path: Path) -> Ledger:
        """Make an empty ledger, in a folder that is there; one that is there already is opened."""
        database.make(path, f"the ledger {path}", _APPLICATION, _fill)
        return cls(path)

    def charge(
        self, charge: Charge, clients: Sequence[int], limits: Limits = NO_LIMITS, at_least: int = 1
    ) -> list[bool]:
        """Charge each client that can afford it, all at once, and return which those are.

        Where fewer than `at_least` can, nobody is charged, and none is returned as one that can.

        Asking and charging are one transaction, so that processes that share the ledger cannot
        together exceed the limits. On return the charges are on disk. A ledger of an older version
        gets the tables of today in the same transaction.
        """
        with self._transaction(write=True) as connection:
            books = self._read(connection)
            affords = books.affordable(clients, charge.release, limits)
            if sum(affords) < at_least:
                affords = [False] * len(affords)
            at, what = datetime.now(UTC).isoformat(timespec="seconds"), written(charge.release)
            entries = [
                _Entry(at, charge.run, charge.round, client, what, charge.release.radius)
                for client, fits in zip(clients, affords, strict=True)
                if fits
            ]
            if (version := _version(connection)) != _VERSION:
                books = self._rewrite(connection, version)
            if entries:
                books = _append(connection, books, entries)
            self._known = books
        return affords

    def accounts(self) -> dict[int, Account]:
        """Return what every client has released, by client."""
        with self._transaction() as connection:
            books = self._read(connection)
            return {client: books.account(client) for client in sorted(books.totals)}

    def account(self, client: int) -> Account:
        """Return what a client has released."""
        with self._transaction() as connection:
            return self._read(connection).account(client)

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield every charge, oldest first."""
        with self._transaction() as connection:
            books = self._read(connection)
            if (version := _version(connection)) != _VERSION:
                entries = self._old_entries(connection, version)
            else:
                rows = connection.execute(f"SELECT {_COLUMNS} FROM charges ORDER BY id")
                entries = (
                    _Entry(at, run, round, client, books.releases[release], radius)
                    for at, run, round, client, release, radius in rows
                )
            for entry in entries:
                yield {
                    "at": entry.at,
                    "run": entry.run,
                    "round": entry.round,
                    "client": entry.client,
                    **asdict(read(entry.what)),
                    "radius": entry.radius,
                }

    @contextmanager
    def _transaction(self, write: bool = False) -> Iterator[sqlite3.Connection]:
        """Have the ledger stand still; what was written is on disk afterwards, or none of it is."""
        try:
            connection = database.connect(self.path)
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger {self.path} cannot be opened: {error}") from error
        try:
            with database.transaction(connection, write):
                yield connection
        except sqlite3.OperationalError as error:
            raise LedgerError(f"the ledger {self.path} cannot be read or written: {error}") from error
        except (sqlite3.Error, *_FAULTS) as error:
            raise self._damaged(error) from error

    def _check(self, connection: sqlite3.Connection) -> None:
        """Raise unless SQLite itself finds nothing wrong with the file, and the tables are the ledger's."""
        version = _version(connection)
        schema = connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        if version == _VERSION:
            fits = sorted(sql for _, sql in schema) == sorted(_SCHEMA)
        else:
            fits = [name for name, _ in schema] == _OLD_TABLES.get(version)
        if not fits:
            raise self._damaged("its tables are not a ledger's")
        long = version == _VERSION and not self._whole and _number(connection) > _WHOLE
        for part in ("(releases)", "(totals)", "(head)") if long else ("",):
            faults = [fault for (fault,) in connection.execute(f"PRAGMA integrity_check{part}")]
            if faults != ["ok"]:
                raise self._damaged(str(faults[0]).splitlines()[-1])

    def _read(self, connection: sqlite3.Connection) -> _Books:
        """Return how the ledger stands; raise unless what came since it was last read fits together."""
        if (version := _version(connection)) != _VERSION:
            return _summed(self._old_entries(connection, version))
        charges, last, digest = self._head(connection)
        number, hash = self._known.charges, self._known.hash
        if charges < number:
            raise self._damaged(f"it had {number} charges, and has {charges}")
        if charges - number > _WHOLE and not self._whole:
            number = charges - _TAIL
            [(hash,)] = connection.execute("SELECT hash FROM charges WHERE id = ?", (number,)).fetchall()
        releases = dict(connection.execute("SELECT id, what FROM releases ORDER BY id").fetchall())
        totals = connection.execute(
            "SELECT client, first, release, times FROM totals ORDER BY client, first"
        ).fetchall()
        if _digest(list(releases.items()), totals) != digest:
            raise self._damaged("the totals are not as they were written")
        from_the_first = number == 0
        counted: _Totals = defaultdict(dict)
        for id, own, *content in connection.execute(
            f"SELECT id, hash, {_COLUMNS} FROM charges WHERE id > ? ORDER BY id", (number,)
        ):
            at, run, round, client, release, radius = content
            number, hash = number + 1, _Entry(at, run, round, client, releases[release], radius).hash(hash)
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

    def _head(self, connection: sqlite3.Connection) -> _Row:
        heads = connection.execute("SELECT charges, hash, totals FROM head").fetchall()
        if len(heads) != 1:
            raise self._damaged("it does not say how many charges it has")
        head: _Row = heads[0]
        return head

    def _old_entries(self, connection: sqlite3.Connection, version: int) -> Iterator[_Entry]:
        """Yield the charges of a ledger of an older version, by the dataset's numbers."""
        chained = version == _BEFORE_RELEASES
        number, hash = 0, _Books().hash
        own = "hash" if chained else "NULL"
        for old, *content in connection.execute(f"SELECT {own}, {_OLD_COLUMNS} FROM charges ORDER BY id"):
            number, hash = number + 1, sha256(hash + repr(tuple(content)).encode()).digest()
            if chained and old != hash:
                raise self._damaged(f"charge {number} is not as it was written")
            at, run, round, client, kind, n, nu, mode, radius = content
            # How many hypotheses there were is not on record, so that the choice is open.
            hypotheses = 0 if kind == Kind.TRAIN else 1
            what = written(Release(Kind(kind), n, nu, Clipping(mode), hypotheses=hypotheses))
            for node in range(1 if chained else self._nodes):
                of_all = client if chained else node + self._nodes * client
                yield _Entry(at, run, round, of_all, what, radius)
        if chained and (number, hash) != self._head(connection)[:2]:
            raise self._damaged("its last charge is not the one that was written")

    def _rewrite(self, connection: sqlite3.Connection, version: int) -> _Books:
        """Give a ledger of an older version the tables of today; the caller commits that, or nothing."""
        entries = list(self._old_entries(connection, version))
        for table in _OLD_TABLES[version]:
            if table != "by_client":  # an index, which goes with its table
                connection.execute(f"DROP TABLE {table}")
        _make_tables(connection)
        return _append(connection, _Books(), entries)

    def _damaged(self, fault: object) -> LedgerError:
        return LedgerError(f"the ledger {self.path} is damaged ({fault}); restore it from a backup")


def _version(connection: sqlite3.Connection) -> int:
    [[version]] = connection.execute("PRAGMA user_version")
    return int(version)


def _number(connection: sqlite3.Connection) -> int:
    [[charges]] = connection.execute("SELECT COALESCE(MAX(charges), 0) FROM head")
    return int(charges)


def _digest(releases: Sequence[_Row], totals: Sequence[_Row]) -> bytes:
    """Return the hash of all releases (number, what) and totals (client, first, release, times), in order."""
    return sha256(repr((releases, totals)).encode()).digest()


def _append(connection: sqlite3.Connection, books: _Books, entries: Iterable[_Entry]) -> _Books:
    """Write charges; return how the ledger then stands."""
    number, hash, releases, totals = books.charges, books.hash, dict(books.releases), dict(books.totals)
    numbers = {what: release for release, what in releases.items()}
    rows, changed = [], set()
    for entry in entries:
        number, hash = number + 1, entry.hash(hash)
        release = numbers.setdefault(entry.what, len(numbers) + 1)
        releases[release] = entry.what
        rows.append((number, entry.at, entry.run, entry.round, entry.client, release, entry.radius, hash))
        own = dict(totals.get(entry.client, {}))
        first, times = own.get(release, (number, 0))
        own[release] = first, times + 1
        totals[entry.client] = own
        changed.add((entry.client, release))
    connection.executemany(
        "INSERT INTO releases VALUES (?, ?)", [pair for pair in releases.items() if pair[0] not in books.releases]
    )
    connection.executemany("INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    written_anew = []
    for client, release in changed:
        first, times = totals[client][release]
        written_anew.append((client, first, release, times))
    connection.executemany("INSERT OR REPLACE INTO totals VALUES (?, ?, ?, ?)", written_anew)
    after = _Books(number, hash, releases, totals)
    connection.execute("INSERT OR REPLACE INTO head VALUES (1, ?, ?, ?)", (number, hash, after.digest))
    return after


def _summed(entries: Iterable[_Entry]) -> _Books:
    """Return how a ledger of an older version stands, as far as limits go."""
    numbers: dict[str, int] = {}
    totals: _Totals = defaultdict(dict)
    for charge, entry in enumerate(entries, 1):
        release = numbers.setdefault(entry.what, len(numbers) + 1)
        first, times = totals[entry.client].get(release, (charge, 0))
        totals[entry.client][release] = first, times + 1
    return _Books(releases={number: what for what, number in numbers.items()}, totals=totals)


def _make_tables(connection: sqlite3.Connection) -> None:
    for table in _SCHEMA:
        connection.execute(table)
    connection.execute(f"PRAGMA user_version = {_VERSION}")


def _fill(connection: sqlite3.Connection) -> None:
    """Write an empty ledger's tables."""
    _make_tables(connection)
    _append(connection, _Books(), [])


def _check_header(path: Path) -> None:
    """Raise unless the file is a ledger of a version that is read here; never write to it."""
    if not path.exists():
        raise LedgerError(f"there is no ledger {path}; a new one is made by: umbel ledger create PATH")
    if not path.is_file():
        raise LedgerError(f"the ledger {path} is not a file")
    if path.stat().st_size == 0:
        raise LedgerError(f"the ledger {path} is empty: charges may be lost; restore it from a backup")
    application, version = database.header(path) or (0, 0)
    if application != _APPLICATION:
        raise LedgerError(f"{path} is not umbel's ledger; set ledger-path to another file")
    if version not in (*_OLD_TABLES, _VERSION):
        raise LedgerError(f"the ledger {path} is of version {version}, this umbel reads {_VERSION}; upgrade umbel")
