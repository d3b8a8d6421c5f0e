"""A site's ledger: one SQLite file, a row a charge, durable before any noise is drawn.

Three tables hold it. ``charges`` has a row a charge, each with the SHA-256 of the row before and of its
own content. ``totals`` has what each client has spent. ``head`` has one row: the number of charges, the
hash of the last, and that of all totals. All three change in one transaction, so that a ledger of which
a part was changed, lost or brought back does not fit together, and is refused. There is no key in it:
this finds damage, and no forger.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any

from privacy import database
from privacy.charges import NO_LIMITS, Account, Charge, Limits
from protocol.errors import LedgerError
from protocol.release import Kind, RadiusMode, Release

_APPLICATION = 0x554D424C  # "UMBL"
_VERSION = 2
_BEFORE_THE_CHAIN = 1  # the version without hashes, which is still read
_SCHEMA = (
    """CREATE TABLE charges (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    client INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('train', 'report')),
    n INTEGER NOT NULL CHECK (n > 0),
    noise_multiplier REAL NOT NULL CHECK (noise_multiplier >= 0),
    radius_mode TEXT NOT NULL,
    radius REAL,
    hash BLOB NOT NULL
) STRICT""",
    "CREATE TABLE totals (client INTEGER PRIMARY KEY, times INTEGER NOT NULL, spent TEXT NOT NULL) STRICT",
    "CREATE TABLE head (id INTEGER PRIMARY KEY, charges INTEGER NOT NULL, hash BLOB NOT NULL, totals BLOB NOT NULL)"
    " STRICT",
)
_OLD_NAMES = ("by_client", "charges")  # a table and its index
_COLUMNS = ("at", "run", "round", "client", "kind", "n", "noise_multiplier", "radius_mode", "radius")
_CONTENT = ", ".join(_COLUMNS)
_CLIENT, _N, _NU = (_COLUMNS.index(name) for name in ("client", "n", "noise_multiplier"))

# A ledger of so many charges is checked from the first on in some 50 ms. Each message opens it.
_WHOLE = 10_000
_TAIL = 2_000  # of a longer one, so many of the last

_UNBOUNDED = "unbounded"
_FAULTS = (ArithmeticError, LookupError, MemoryError, TypeError, ValueError)  # what Python makes of odd values

_Row = tuple[Any, ...]


@dataclass(frozen=True)
class _Total:
    """What a client has spent in all, and how often it paid."""

    times: int = 0
    spent: str = "0/1"  # as it is written down: most of those that are read are never added to

    @property
    def value(self) -> Fraction | float:
        if self.spent == _UNBOUNDED:
            return float("inf")
        above, below = self.spent.split("/")
        return Fraction(int(above, 16), int(below, 16))

    def plus(self, cost: Fraction | None, times: int = 1) -> _Total:
        """Return the total after paying so often."""
        spent = self.value
        if cost is None or isinstance(spent, float):
            return _Total(self.times + times, _UNBOUNDED)
        spent += cost * times
        # Hexadecimal, since Python turns no more than 4,300 decimal digits into a number.
        return _Total(self.times + times, f"{spent.numerator:x}/{spent.denominator:x}")


@dataclass(frozen=True)
class _Books:
    """A ledger as it stands: number of charges, hash of the last, totals by client."""

    charges: int
    hash: bytes
    totals: Mapping[int, _Total]


_EMPTY = _Books(0, bytes(32), {})


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
        Where the federation's clients are dealt out to so many nodes, by whose own numbers an older
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
        self._known = _EMPTY
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

    def affordable(self, clients: Sequence[int], cost: Fraction | None, limits: Limits) -> list[bool]:
        """Return for each client whether one more charge stays within the limits."""
        if not limits.any:
            return [True] * len(clients)
        with self._transaction() as connection:
            return _affordable(self._read(connection), clients, cost, limits)

    def charge(self, charge: Charge, clients: Sequence[int], limits: Limits = NO_LIMITS) -> list[bool]:
        """Charge each client that can afford it, all at once, and return which those are.

        Asking and charging are one transaction, so that processes that share the ledger cannot
        together exceed the limits. On return the charges are on disk. A ledger of before the chain of
        hashes gets one in the same transaction.
        """
        with self._transaction(write=True) as connection:
            old = _version(connection) == _BEFORE_THE_CHAIN
            books = _rewrite(connection, self._nodes) if old else self._read(connection)
            affords = _affordable(books, clients, charge.release.cost, limits)
            paid, at = charge.release, datetime.now(UTC).isoformat(timespec="seconds")
            release = (str(paid.kind), paid.n, paid.noise_multiplier, str(paid.radius_mode), paid.radius)
            rows = [
                (at, charge.run, charge.round, client, *release)
                for client, fits in zip(clients, affords, strict=True)
                if fits
            ]
            if rows or old:
                books = _append(connection, books, rows)
        self._known = books
        return affords

    def accounts(self) -> list[Account]:
        """Return what every client has spent, by kind and price."""
        with self._transaction() as connection:
            self._read(connection)
            rows = connection.execute(
                "SELECT client, kind, n, noise_multiplier, radius_mode, COUNT(*) FROM charges GROUP BY 1, 2, 3, 4, 5"
            )
            return [
                Account(client, Release(Kind(kind), n, nu, RadiusMode(mode)), times)
                for client, kind, n, nu, mode, times in rows
            ]

    def spent(self, client: int) -> Fraction | float:
        """Return what a client has spent in all; infinite after an unsanitised release."""
        with self._transaction() as connection:
            return self._read(connection).totals.get(client, _Total()).value

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield every charge, oldest first."""
        with self._transaction() as connection:
            self._read(connection)
            for row in connection.execute(f"SELECT {_CONTENT} FROM charges ORDER BY id"):
                yield dict(zip(_COLUMNS, row, strict=True))

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
        tables = [sql for _, sql in schema] if version == _VERSION else tuple(name for name, _ in schema)
        if tables != (sorted(_SCHEMA) if version == _VERSION else _OLD_NAMES):
            raise self._damaged("its tables are not a ledger's")
        long = version == _VERSION and not self._whole and _number(connection) > _WHOLE
        for part in ("(totals)", "(head)") if long else ("",):
            faults = [fault for (fault,) in connection.execute(f"PRAGMA integrity_check{part}")]
            if faults != ["ok"]:
                raise self._damaged(str(faults[0]).splitlines()[-1])

    def _read(self, connection: sqlite3.Connection) -> _Books:
        """Return how the ledger stands; raise unless what came since it was last read fits together."""
        if _version(connection) == _BEFORE_THE_CHAIN:
            return _summed(_old_rows(connection, self._nodes))
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
        from_the_first = number == 0
        clients: Counter[_Row] = Counter()
        for id, own, *content in connection.execute(
            f"SELECT id, hash, {_CONTENT} FROM charges WHERE id > ? ORDER BY id", (number,)
        ):
            number, hash = number + 1, _hash(hash, content)
            if (id, own) != (number, hash):
                raise self._damaged(f"charge {number} is not as it was written")
            clients[content[_CLIENT], content[_N], content[_NU]] += 1
        if number != charges:
            raise self._damaged(f"it has {number} of {charges} charges")
        if hash != last:
            raise self._damaged("its last charge is not the one that was written")
        totals = connection.execute("SELECT client, times, spent FROM totals ORDER BY client").fetchall()
        if _digest(totals) != digest:
            raise self._damaged("the totals are not as they were written")
        books = _Books(charges, last, {client: _Total(times, spent) for client, times, spent in totals})
        if from_the_first and _totals(clients) != books.totals:
            raise self._damaged("the totals are not the sums of the charges")
        self._known = books
        return books

    def _damaged(self, fault: object) -> LedgerError:
        return LedgerError(f"the ledger {self.path} is damaged ({fault}); restore it from a backup")


def _version(connection: sqlite3.Connection) -> int:
    [[version]] = connection.execute("PRAGMA user_version")
    return int(version)


def _number(connection: sqlite3.Connection) -> int:
    [[charges]] = connection.execute("SELECT COALESCE(MAX(charges), 0) FROM head")
    return int(charges)


def _hash(before: bytes, content: Iterable[Any]) -> bytes:
    """Return the hash of a charge: that of the one before it, and its content as Python writes a tuple."""
    return sha256(before + repr(tuple(content)).encode()).digest()


def _digest(totals: Sequence[_Row]) -> bytes:
    """Return the hash of all totals (client, times, spent), in the order of clients."""
    return sha256(repr(totals).encode()).digest()


def _totals(clients: Mapping[_Row, int]) -> dict[int, _Total]:
    """Return the totals of charges that are counted by client, n and nu."""
    totals: dict[int, _Total] = {}
    for (client, n, nu), times in clients.items():
        cost = Release(Kind.TRAIN, n, nu, RadiusMode.UPDATE).cost  # it is the same for every kind and mode
        totals[client] = totals.get(client, _Total()).plus(cost, times)
    return totals


def _affordable(books: _Books, clients: Sequence[int], cost: Fraction | None, limits: Limits) -> list[bool]:
    if not limits.any:
        return [True] * len(clients)
    totals = [books.totals.get(client, _Total()) for client in clients]
    return [limits.allow(total.value, total.times, cost) for total in totals]


def _append(connection: sqlite3.Connection, books: _Books, rows: Iterable[_Row]) -> _Books:
    """Write charges, in the order of `_COLUMNS`; return how the ledger then stands."""
    number, hash, totals = books.charges, books.hash, dict(books.totals)
    written = []
    for row in rows:
        number, hash = number + 1, _hash(hash, row)
        written.append((number, *row, hash))
        cost = Release(Kind.TRAIN, row[_N], row[_NU], RadiusMode.UPDATE).cost
        totals[row[_CLIENT]] = totals.get(row[_CLIENT], _Total()).plus(cost)
    connection.executemany(f"INSERT INTO charges VALUES ({', '.join('?' * (len(_COLUMNS) + 2))})", written)
    connection.executemany(
        "INSERT OR REPLACE INTO totals VALUES (?, ?, ?)",
        [(client, total.times, total.spent) for client, total in totals.items() if books.totals.get(client) != total],
    )
    digest = _digest([(client, totals[client].times, totals[client].spent) for client in sorted(totals)])
    connection.execute("INSERT OR REPLACE INTO head VALUES (1, ?, ?, ?)", (number, hash, digest))
    return _Books(number, hash, totals)


def _old_rows(connection: sqlite3.Connection, nodes: int) -> Iterator[_Row]:
    """Yield the charges of a ledger of before the chain, by the federation's numbers."""
    for row in connection.execute(f"SELECT {_CONTENT} FROM charges ORDER BY id"):
        for node in range(nodes):
            yield (*row[:_CLIENT], node + nodes * row[_CLIENT], *row[_CLIENT + 1 :])


def _summed(rows: Iterable[_Row]) -> _Books:
    """Return how a ledger of before the chain stands."""
    return _Books(0, _EMPTY.hash, _totals(Counter((row[_CLIENT], row[_N], row[_NU]) for row in rows)))


def _rewrite(connection: sqlite3.Connection, nodes: int) -> _Books:
    """Give a ledger of before the chain the tables of today; the caller commits that, or nothing."""
    rows = list(_old_rows(connection, nodes))
    connection.execute("DROP TABLE charges")  # and its index
    _make_tables(connection)
    return _append(connection, _EMPTY, rows)


def _make_tables(connection: sqlite3.Connection) -> None:
    for table in _SCHEMA:
        connection.execute(table)
    connection.execute(f"PRAGMA user_version = {_VERSION}")


def _fill(connection: sqlite3.Connection) -> None:
    """Write an empty ledger's tables."""
    _make_tables(connection)
    _append(connection, _EMPTY, [])


def _check_header(path: Path) -> None:
    """Raise unless the file is a ledger of a version that is read here; never write to it."""
    if not path.exists():
        raise LedgerError(f"there is no ledger {path}; a new one is made by: python -m privacy ledger create PATH")
    if not path.is_file():
        raise LedgerError(f"the ledger {path} is not a file")
    if path.stat().st_size == 0:
        raise LedgerError(f"the ledger {path} is empty: charges may be lost; restore it from a backup")
    application, version = database.header(path) or (0, 0)
    if application != _APPLICATION:
        raise LedgerError(f"{path} is not umbel's ledger; set ledger-path to another file")
    if version not in (_BEFORE_THE_CHAIN, _VERSION):
        raise LedgerError(f"the ledger {path} is of version {version}, this umbel reads {_VERSION}; upgrade umbel")
