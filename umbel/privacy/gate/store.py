"""A site's store: one SQLite file with its ledger, its memory of runs, and its clients' names.

The store is made, changed and migrated in one step each. After a crash it is in the state before the step, or after.
`umbel.privacy.gate.ledger` describes the tables of charges, and checks them.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from logging import WARNING
from pathlib import Path
from typing import Any, Self

from umbel.privacy.gate.reserve import Reserve
from umbel.privacy.gate.site import Site
from umbel.protocol.errors import LedgerError, UmbelError
from umbel.protocol.flower import log
from umbel.protocol.home import free_text, is_full, make_home_of, sync
from umbel.protocol.old_names import SETTINGS
from umbel.protocol.run_config import RunConfig

_APPLICATION = 0x554D424C  # "UMBL"
VERSION = 5
"""The version of the stores that this umbel writes."""
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
# Version 4 did not say who decided on a request, and had no signatures.
_WITHOUT_PEOPLE = 4
_REQUESTS_4 = """CREATE TABLE requests (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, at TEXT NOT NULL, run TEXT NOT NULL, status TEXT NOT NULL,
    asks TEXT NOT NULL
) STRICT"""
_REQUEST = "id, digest, at, run, status, asks"
_NAMES = {"clients": "CREATE TABLE clients (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT"}
TABLES = _LEDGER | _RUNS | _NAMES

# umbel 0.1 kept only the ledger in this file, and the rest in two files beside it.
_ALONE, _RUNS_APPLICATION = 3, 0x554D4252
_RUNS_FILE, _NAMES_FILE, _TAKEN_OVER = ".runs.sqlite", ".clients.json", ".taken-over"
_FIELDS = {"radius": "clip_norm", "radius_mode": "clipping"}
# Two old requests may be the same under current names. A refusal of either holds, and otherwise an approval of either.
_SAME_REQUEST = (
    " ON CONFLICT (digest) DO UPDATE SET status = CASE WHEN 'refused' IN (status, excluded.status) THEN 'refused' "
    "WHEN 'approved' IN (status, excluded.status) THEN 'approved' ELSE status END"
)


class Store:
    """An open store.

    Parameters
    ----------
    path : Path
        An existing store; see `create` and `of`. A store of an earlier version is migrated.

    Raises
    ------
    LedgerError
        If the file is not a store, or is damaged. It stays unchanged: a site that lost its ledger must decide itself
        how much its clients have spent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # If there is a journal, the header may be that of a migration that SQLite is about to roll back.
        if self._version_in_header() < VERSION or Path(f"{path}-journal").exists():
            self._migrate()

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
        [[version]] = connection.execute("PRAGMA user_version")
        tables = {
            _ALONE: [sql.replace("clip_norm", "radius") for sql in _LEDGER.values()],
            _WITHOUT_PEOPLE: [*(TABLES | {"requests": _REQUESTS_4, "signed": ""}).values()],
            VERSION: [*TABLES.values()],
        }
        schema = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY sql")
        if [sql for (sql,) in schema] != sorted(filter(None, tables.get(version, []))):
            raise self._damaged("its tables are not a ledger's")

    def _check_integrity(self, connection: sqlite3.Connection, *tables: str) -> None:
        """Raise unless SQLite finds no fault in some tables, by default in the whole file."""
        for part in [f"({table})" for table in tables] or [""]:
            faults = [fault for (fault,) in connection.execute(f"PRAGMA integrity_check{part}")]
            if faults != ["ok"]:
                raise self._damaged(str(faults[0]).splitlines()[-1])

    def _version_in_header(self) -> int:
        """Return the file's version; raise unless the file is a store of a supported version.

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
        if version not in (_ALONE, _WITHOUT_PEOPLE, VERSION):
            raise LedgerError(
                f"the ledger {path} has version {version}, but this umbel reads version {VERSION}; upgrade umbel",
                code="ledger.version",
            )
        return version

    def _migrate(self) -> None:
        """Bring a store of an earlier version to this one, in one transaction.

        A ledger of umbel 0.1 gets the other tables, with what the files beside it hold. Charges, releases, totals and
        hashes do not change.
        """
        with self._transaction(write=True) as connection:
            [[version]] = connection.execute("PRAGMA user_version")
            if version == VERSION:
                return  # another process was first
            self._check_schema(connection)
            self._check_integrity(connection)
            if version == _WITHOUT_PEOPLE:
                connection.execute("ALTER TABLE requests RENAME TO older")
                _add_tables(connection, {name: _RUNS[name] for name in ("requests", "signed")})
                connection.execute(f"INSERT INTO requests ({_REQUEST}) SELECT {_REQUEST} FROM older")
                connection.execute("DROP TABLE older")
                return
            connection.execute("ALTER TABLE charges RENAME COLUMN radius TO clip_norm")
            _add_tables(connection, _RUNS | _NAMES)
            _take_over(connection, self.path)
        _set_aside(self.path)


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
            _add_names(connection, new, len(known))


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
    policy = site.policy
    counts_reports = policy.max_evaluations_in_all < math.inf
    chosen = policy.sets_limits or counts_reports or bool(policy.ledger_path)
    return not (chosen and (site.limits.any or counts_reports))


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
                _add_tables(connection, TABLES)
                connection.execute("INSERT INTO head VALUES (1, 0, ?, ?)", (bytes(32), digest_of_totals([], [])))
                if not path.exists():
                    _take_over(connection, path)
            with suppress(FileExistsError):
                os.link(scratch, path)  # unlike a rename, this never replaces another process's file
                sync(path.parent)
                _set_aside(path)
        finally:
            scratch.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"the ledger {path} cannot be made: {error}", code="ledger.unusable") from error


def _add_tables(connection: sqlite3.Connection, tables: dict[str, str]) -> None:
    for table in tables.values():
        connection.execute(table)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _add_names(connection: sqlite3.Connection, names: Sequence[int | str], first: int) -> None:
    rows = [(number, json.dumps(name)) for number, name in enumerate(names, first)]
    connection.executemany("INSERT INTO clients VALUES (?, ?)", rows)


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


# --- the files of umbel 0.1 beside the ledger


def beside(ledger: Path) -> Path:
    """Return the path of the log of the site with that ledger."""
    return ledger.with_name(ledger.name + LOG_SUFFIX)


def _beside(path: Path) -> tuple[Path, Path]:
    return path.with_name(path.name + _RUNS_FILE), path.with_name(path.name + _NAMES_FILE)


def _take_over(connection: sqlite3.Connection, path: Path) -> None:
    """Copy the files of umbel 0.1 beside a ledger into the store; raise if they are damaged."""
    runs, names = _beside(path)
    try:
        if runs.exists():
            if _header(runs)[0] != _RUNS_APPLICATION:
                raise ValueError(f"{runs.name} is not umbel's")
            with _connected(runs, write=False) as old:
                for table in _RUNS.keys() - {"signed"}:
                    change, same = (_renamed, _SAME_REQUEST) if table == "requests" else (tuple, "")
                    into = f"requests ({_REQUEST})" if table == "requests" else table
                    for row in map(change, old.execute(f"SELECT * FROM {table} ORDER BY id").fetchall()):
                        connection.execute(f"INSERT INTO {into} VALUES ({', '.join('?' * len(row))}){same}", row)
        if names.exists():
            known = json.loads(names.read_text(encoding="utf-8"))
            if not isinstance(known, list) or not all(type(client) in (int, str) for client in known):
                raise ValueError(f"{names.name} is not a list of clients")
            _add_names(connection, known, 0)
    except (OSError, sqlite3.Error, *_FAULTS) as error:
        raise LedgerError(
            f"a file of umbel 0.1 beside the ledger {path} is damaged ({error}); restore it from a backup",
            code="ledger.damaged",
        ) from error


def _renamed(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a request under current names, so that an approval or refusal still applies.

    Settings that umbel 0.1 did not have are at their defaults.
    """
    id, digest, at, run, status, text = row
    asks = json.loads(text)
    with suppress(UmbelError):  # a run config that is invalid now is never requested again
        config = {SETTINGS.get(name, name): value for name, value in asks["config"].items()}
        asks["config"] = RunConfig.parse(config).unsigned()
        asks["differs"] = {_FIELDS.get(name, name): value for name, value in asks["differs"].items()}
        digest, text = request_of(asks)
    return id, digest, at, run, status, text


def _set_aside(path: Path) -> None:
    """Rename the files that were taken over, so that a later store does not take them over too."""
    for file in _beside(path):
        with suppress(FileNotFoundError):
            os.rename(file, file.with_name(file.name + _TAKEN_OVER))
