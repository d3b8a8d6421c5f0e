"""A site's store: one SQLite file with its ledger, its memory of runs, and its clients' names.

The store is made and changed in one step each. After a crash it is in the state before the step, or after.
`umbel.privacy.gate.ledger` describes the tables of charges, and checks them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from logging import WARNING
from pathlib import Path
from typing import Any, Self

from umbel.privacy.gate.site import Site
from umbel.protocol.errors import DiskError, LedgerError
from umbel.protocol.home import free_space, free_text, is_full, make_home_of, sync, told_if_full
from umbel.protocol.log import log

_RESERVED = 1 << 20
"""Bytes of the file: more than two of the longest lines, and more than the charges of 10,000 clients."""


class Reserve:
    """Room on a site's disk that is kept free for the line of a message in the site's log.

    A client is charged before it trains, and the log's line comes last. If the disk filled up in between, the client
    would have been charged for a release that may not leave. So the site answers only while a file of fixed size lies
    beside the ledger. A line for which there is no other room takes the place of that file.

    Whenever the disk was full, the file goes. While it cannot be written again, with as much room besides, the site
    answers nothing and charges no client.
    """

    def __init__(self, ledger: Path) -> None:
        self.path = ledger.with_name(f"{ledger.name}.reserve")

    def keep(self) -> None:
        """Make the file if there is none; raise `DiskError` unless it is there, with as much free room besides."""
        if not self._there():
            self._make()
        self.look()

    def look(self) -> None:
        """Raise `DiskError` unless `keep` has room for the file and as much besides; nothing is written."""
        if free_space(self.path) < (_RESERVED if self._there() else 2 * _RESERVED):
            raise DiskError(
                f"the disk is full ({free_text(self.path)}): nothing can be charged in {self.path.parent}, and this "
                "site answers nothing; make room",
                code="disk.full",
            )

    def drop(self) -> bool:
        """Remove the file, because its room is needed; return whether there was one."""
        there = self._there()
        self.path.unlink(missing_ok=True)
        return there

    def _there(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size >= _RESERVED

    def _make(self) -> None:
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            scratch.unlink(missing_ok=True)
            with (
                told_if_full(self.path),
                open(scratch, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)) as file,
            ):
                # Random bytes, since some file systems keep others in less room.
                file.write(os.urandom(2 * _RESERVED))
                file.flush()
                os.fsync(file.fileno())
                file.truncate(_RESERVED)
            scratch.replace(self.path)
        finally:
            scratch.unlink(missing_ok=True)


_APPLICATION = 0x554D424C  # "UMBL"
VERSION = 1
"""The version of the stores that this umbel writes, and the only one that it reads."""
_NAMED = bytes.fromhex("d9d505f920a163d7")  # the end of an SQLite journal that names a journal of several databases
_BUSY_S = 60.0
_PAGE = 10_000  # rows that are read at once
_BEFORE_ALL = -(1 << 63)
LOG_SUFFIX = ".log.jsonl"
# The errors that Python raises for odd values in a damaged file.
_FAULTS = (ArithmeticError, LookupError, MemoryError, TypeError, ValueError)

_LEDGER = {
    "releases": "CREATE TABLE releases (id INTEGER PRIMARY KEY, what TEXT NOT NULL) STRICT",
    "charges": """CREATE TABLE charges (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    client INTEGER NOT NULL,
    release INTEGER NOT NULL,
    clip_norm REAL,
    hash BLOB NOT NULL
) STRICT""",
    "totals": "CREATE TABLE totals (client INTEGER NOT NULL, first INTEGER NOT NULL, release INTEGER NOT NULL, "
    "times INTEGER NOT NULL, PRIMARY KEY (client, first)) STRICT, WITHOUT ROWID",
    "head": "CREATE TABLE head (id INTEGER PRIMARY KEY, charges INTEGER NOT NULL, hash BLOB NOT NULL, "
    "totals BLOB NOT NULL) STRICT",
}
_RUNS = {
    "evaluations": """CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY, node TEXT NOT NULL, run TEXT NOT NULL, messages INTEGER NOT NULL, UNIQUE (node, run)
) STRICT""",
    "sent": """CREATE TABLE sent (
    id INTEGER PRIMARY KEY, node TEXT NOT NULL, run TEXT NOT NULL, name TEXT NOT NULL, digest TEXT NOT NULL,
    UNIQUE (node, run, name, digest)
) STRICT""",
    "ended": "CREATE TABLE ended (id INTEGER PRIMARY KEY, node TEXT NOT NULL, run TEXT NOT NULL, UNIQUE (node, run)) "
    "STRICT",
    "requests": """CREATE TABLE requests (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, at TEXT NOT NULL, run TEXT NOT NULL, status TEXT NOT NULL,
    asks TEXT NOT NULL, decided TEXT NOT NULL DEFAULT '', person TEXT NOT NULL DEFAULT '',
    reason TEXT NOT NULL DEFAULT '', policy TEXT NOT NULL DEFAULT ''
) STRICT""",
    "signed": "CREATE TABLE signed (id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, run TEXT NOT NULL) STRICT",
}
_NAMES = {"clients": "CREATE TABLE clients (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT"}
TABLES = _LEDGER | _RUNS | _NAMES


class Store:
    """An open store.

    Parameters
    ----------
    path : Path
        An existing store; see `create` and `of`.

    Raises
    ------
    LedgerError
        If the file is not a store, is of another version, or is damaged. It stays unchanged: a site that lost its
        ledger must decide itself how much its clients have spent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_header()

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make an empty store in an existing folder. An existing store is opened."""
        _make(path)
        return cls(path)

    @classmethod
    def of(cls, site: Site) -> Self:
        """Open the store of a site that serves data; make it under the conditions of `begin`."""
        return cls(cls.begin(site))

    @staticmethod
    def begin(site: Site) -> Path:
        """Return the path of the store; if there is none yet, make an empty one, and its folder.

        A missing store may be a lost one. So none is made if the site has answered before: the store also holds counts
        of reports, used signatures and people's refusals. Where there is a limit, none is made either if the site sets
        limits itself, or names the path, where a volume may be missing.
        """
        path = site.ledger_path
        assert path is not None, "a site that serves data has a ledger"
        if not path.exists() and may_begin(site, path):
            make_home_of(path)
            log(WARNING, "umbel made a new, empty ledger: %s", path)
            _make(path)
        return path

    def table(self, table: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of one of `TABLES` whose rows have a number, oldest first, as stored.

        The store is locked only while some rows are read: no charge waits for a reader that takes its time.
        """
        assert table in TABLES
        last = _BEFORE_ALL
        while True:
            with self._transaction() as connection:
                found = connection.execute(
                    f"SELECT * FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT ?", (last, _PAGE)
                )
                names, page = [column[0] for column in found.description], found.fetchall()
            for row in page:
                yield dict(zip(names, row, strict=True))
            if len(page) < _PAGE:
                return
            last = page[-1][0]

    def hash_of(self, charge: int = 0) -> tuple[int, str]:
        """Return the number of charges, and the hash of one of them, by default of the last; empty if it is missing."""
        with self._transaction() as connection:
            [[charges]] = connection.execute("SELECT COALESCE(MAX(charges), 0) FROM head")
            row = connection.execute("SELECT hash FROM charges WHERE id = ?", (charge or charges,)).fetchone()
        return charges, bytes(row[0]).hex() if row else ""

    @contextmanager
    def _transaction(self, write: bool = False) -> Iterator[sqlite3.Connection]:
        """Lock the store; afterwards all changes are on disk, or none."""
        try:
            with _connected(self.path, write) as connection:
                yield connection
        except (sqlite3.OperationalError, UnicodeEncodeError) as error:
            if is_full(error):
                Reserve(self.path).drop()
                raise LedgerError(
                    f"the disk is full ({free_text(self.path)}): the ledger {self.path} cannot be written, and nothing "
                    "was charged; make room",
                    code="ledger.disk-full",
                ) from error
            raise LedgerError(f"the ledger {self.path} cannot be used: {error}", code="ledger.unusable") from error
        except (sqlite3.Error, *_FAULTS) as error:
            raise self._damaged(error) from error

    def _damaged(self, fault: object) -> LedgerError:
        return LedgerError(f"the ledger {self.path} is damaged ({fault}); restore a backup", code="ledger.damaged")

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        """Raise unless the tables are a store's."""
        schema = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY sql")
        if [sql for (sql,) in schema] != sorted(TABLES.values()):
            raise self._damaged("its tables are not a ledger's")

    def _check_integrity(self, connection: sqlite3.Connection, *tables: str) -> None:
        """Raise unless SQLite finds no fault in some tables, by default in the whole file."""
        for part in [f"({table})" for table in tables] or [""]:
            faults = [fault for (fault,) in connection.execute(f"PRAGMA integrity_check{part}")]
            if faults != ["ok"]:
                raise self._damaged(str(faults[0]).splitlines()[-1])

    def _check_header(self) -> None:
        """Raise unless the file is a store of this version.

        Nothing is written: SQLite would roll back an interrupted change, and a file that is not umbel's must stay
        unchanged.
        """
        path = self.path
        try:
            application, version = _header(path)
        except FileNotFoundError:
            raise LedgerError(
                f"there is no ledger {path}; name another, or make a new one: umbel site journal --create {path}",
                code="ledger.missing",
            ) from None
        except OSError as error:
            raise LedgerError(f"the ledger {path} cannot be opened: {error}", code="ledger.unusable") from error
        if path.stat().st_size == 0:
            raise LedgerError(f"the ledger {path} is empty; restore it from a backup", code="ledger.empty")
        if application != _APPLICATION:
            raise LedgerError(f"{path} is not umbel's ledger; set another ledger-path", code="ledger.another-file")
        if version != VERSION:
            raise LedgerError(
                f"the ledger {path} has version {version}, but this umbel reads version {VERSION}; use the umbel that "
                "wrote it, or set another ledger-path",
                code="ledger.version",
            )


class Names(Store):
    """The numbers of the clients in a site's table: the ledger identifies clients by number."""

    def read(self) -> list[int | str]:
        """Return the clients in order of their numbers."""
        try:
            return [json.loads(row["name"]) for row in self.table("clients")]
        except ValueError as error:
            raise self._damaged(f"a client's name is none: {error}") from None

    def extend(self, known: Sequence[int | str], new: Sequence[int | str]) -> None:
        """Give new clients the next numbers; raise `LedgerError` if there are more than `known` by now."""
        with self._transaction(write=True) as connection:
            [[count]] = connection.execute("SELECT count(*) FROM clients")
            if count != len(known):
                raise LedgerError(
                    f"another process has just numbered clients in {self.path}; restart this one",
                    code="ledger.clients-changed",
                )
            rows = [(number, json.dumps(name)) for number, name in enumerate(new, len(known))]
            connection.executemany("INSERT INTO clients VALUES (?, ?)", rows)


class NamesOnTrial:
    """The numbers that `Names` would give a table's clients; nothing is written."""

    def __init__(self, path: Path) -> None:
        self._names = Names(path).read() if path.exists() else []

    def read(self) -> list[int | str]:
        """Return the clients in order of their numbers."""
        return [*self._names]

    def extend(self, known: Sequence[int | str], new: Sequence[int | str]) -> None:
        """Give new clients the next numbers, here only."""
        self._names = [*known, *new]


def digest_of_totals(releases: Sequence[Any], totals: Sequence[Any]) -> bytes:
    """Return the hash of all releases (number, what) and totals (client, first, release, times), in order."""
    return sha256(repr((releases, totals)).encode()).digest()


def request_of(asks: Mapping[str, Any]) -> tuple[str, str]:
    """Return a request's digest, which identifies it, and its content as stored."""
    text = json.dumps(asks, sort_keys=True, default=str)
    return digest_of_request(text), text


def digest_of_request(text: str) -> str:
    """Return the digest of a request's content as stored."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def has_charge(path: Path, number: int, hashed: str) -> bool:
    """Return whether there is a store whose charge of this number, from 1, has this hash (`Store.hash_of`)."""
    return path.exists() and Store(path).hash_of(number)[1] == hashed


def may_begin(site: Site, path: Path) -> bool:
    """Return whether a site without a store gets an empty one (`Store.begin`)."""
    if beside(path).exists():
        return False
    chosen = site.policy.sets_limits or bool(site.policy.ledger_path)
    return not (chosen and site.limits.any)


def _make(path: Path) -> None:
    """Make an empty store in one step, so that no process ever opens a partial one."""
    if not path.parent.is_dir():
        raise LedgerError(f"there is no folder for {path}; make it, or set ledger-path", code="ledger.no-folder")
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        os.close(handle)
        scratch = Path(name)
        try:
            with _connected(scratch, write=True) as connection:
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(f"PRAGMA user_version = {VERSION}")
                for table in TABLES.values():
                    connection.execute(table)
                connection.execute("INSERT INTO head VALUES (1, 0, ?, ?)", (bytes(32), digest_of_totals([], [])))
            with suppress(FileExistsError):
                os.link(scratch, path)  # unlike a rename, this never replaces another process's file
                sync(path.parent)
        finally:
            scratch.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"the ledger {path} cannot be made: {error}", code="ledger.unusable") from error


@contextmanager
def _connected(path: Path, write: bool) -> Iterator[sqlite3.Connection]:
    """Open an existing file for one transaction."""
    _check_journal(Path(f"{os.path.realpath(path)}-journal"))
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S, isolation_level=None)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        # EXTRA also syncs the folder; otherwise a power cut could bring a journal back.
        connection.execute("PRAGMA synchronous = EXTRA")
        connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        yield connection
        connection.execute("COMMIT")
    finally:
        connection.close()  # rolls back uncommitted changes


def _check_journal(journal: Path) -> None:
    """Raise if a journal names a journal of several databases.

    Ours never do. SQLite deletes the file that is named: from a ledger that somebody sent, any file of this user.
    """
    with suppress(OSError), journal.open("rb") as file:  # there is none, or it is shorter
        file.seek(-len(_NAMED), os.SEEK_END)
        if file.read() == _NAMED:
            raise sqlite3.DatabaseError(f"its journal {journal} names another file")


def _header(path: Path) -> tuple[int, int]:
    """Return application and version of a file; 0 and 0 if it is not SQLite's."""
    with path.open("rb") as file:
        first = file.read(100)
    if not first.startswith(b"SQLite format 3\0"):
        return 0, 0
    return int.from_bytes(first[68:72], "big"), int.from_bytes(first[60:64], "big")


def beside(ledger: Path) -> Path:
    """Return the path of the log of the site with that ledger."""
    return ledger.with_name(ledger.name + LOG_SUFFIX)
