"""A site's ledger: one SQLite file, a row a charge, durable before any noise is drawn."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

from protocol.errors import LedgerError
from protocol.release import Kind, RadiusMode, Release

_APPLICATION = 0x554D424C  # "UMBL"
_VERSION = 1
_BUSY_S = 60.0
_SCHEMA = """
CREATE TABLE charges (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    client INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('train', 'report')),
    n INTEGER NOT NULL CHECK (n > 0),
    noise_multiplier REAL NOT NULL CHECK (noise_multiplier >= 0),
    radius_mode TEXT NOT NULL,
    radius REAL
) STRICT;
CREATE INDEX by_client ON charges (client, kind, n, noise_multiplier, radius_mode);
"""
_COLUMNS = ("at", "run", "round", "client", "kind", "n", "noise_multiplier", "radius_mode", "radius")


@dataclass(frozen=True)
class Charge:
    """A release that each of some clients pays for.

    Attributes
    ----------
    run : str
    round : int
    release : Release
    """

    run: str
    round: int
    release: Release


@dataclass(frozen=True)
class Limits:
    """The most a client may give.

    Attributes
    ----------
    budget : Fraction or None
        The largest sum of n / nu.
    participations : int or None
        The largest number of releases, whatever they cost: with ever more noise a release costs
        ever less, but it may always tell a little.
    """

    budget: Fraction | None = None
    participations: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return self != Limits()

    def allow(self, spent: Fraction | float, times: int, cost: Fraction | None) -> bool:
        """Return whether a client may pay `cost` after having spent `spent` in `times` releases."""
        if self.participations is not None and times >= self.participations:
            return False
        return self.budget is None or (cost is not None and spent + cost <= self.budget)


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Account:
    """What a client has spent on releases of one kind and price.

    Attributes
    ----------
    client : int
    release : Release
        Without its radius, on which the price does not depend.
    times : int
        How often it paid.
    """

    client: int
    release: Release
    times: int

    @property
    def spent(self) -> Fraction | float:
        """The sum, exactly; infinite where nothing bounds it."""
        cost = self.release.cost
        return float("inf") if cost is None else cost * self.times


class Ledger:
    """An open ledger.

    Parameters
    ----------
    path : Path
        A ledger that is there; see `create`.

    Raises
    ------
    LedgerError
        When the file is not a ledger, or damaged. It is left as it is: a site that lost its
        ledger must decide itself what its clients have spent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check(path)

    @classmethod
    def create(cls, path: Path) -> Ledger:
        """Make an empty ledger, in a folder that is there; one that is there already is opened."""
        _create(path)
        return cls(path)

    def affordable(self, clients: Sequence[int], cost: Fraction | None, limits: Limits) -> list[bool]:
        """Return for each client whether one more charge stays within the limits."""
        if not limits.any:
            return [True] * len(clients)
        with self._transaction() as connection:
            return _affordable(connection, clients, cost, limits)

    def charge(self, charge: Charge, clients: Sequence[int], limits: Limits = NO_LIMITS) -> list[bool]:
        """Charge each client that can afford it, all at once, and return which those are.

        Asking and charging are one transaction, so that processes that share the ledger cannot
        together exceed the limits. On return the charges are on disk.
        """
        with self._transaction() as connection:
            affords = _affordable(connection, clients, charge.release.cost, limits)
            paid, at = charge.release, datetime.now(UTC).isoformat(timespec="seconds")
            release = (paid.kind, paid.n, paid.noise_multiplier, paid.radius_mode, paid.radius)
            rows = [
                (at, charge.run, charge.round, client, *release)
                for client, fits in zip(clients, affords, strict=True)
                if fits
            ]
            places = ", ".join("?" * len(_COLUMNS))
            connection.executemany(f"INSERT INTO charges ({', '.join(_COLUMNS)}) VALUES ({places})", rows)
        return affords

    def accounts(self) -> list[Account]:
        """Return what every client has spent, by kind and price."""
        with self._transaction() as connection:
            return _accounts(connection)

    def spent(self, client: int) -> Fraction | float:
        """Return what a client has spent in all; infinite after an unsanitised release."""
        with self._transaction() as connection:
            return sum((account.spent for account in _accounts(connection, [client])), Fraction(0))

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield every charge, oldest first."""
        with self._transaction() as connection:
            for row in connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM charges ORDER BY id"):
                yield dict(zip(_COLUMNS, row, strict=True))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the ledger alone; what was written is on disk afterwards, or none of it is."""
        try:
            connection = _connect(self.path)
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger {self.path} cannot be opened: {error}") from error
        try:
            # EXTRA also syncs the folder, without which a power cut could bring a journal back.
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger {self.path} cannot be read or written: {error}") from error
        finally:
            connection.close()  # rolls back what was not committed


def _connect(path: Path) -> sqlite3.Connection:
    """Open a file that is there; none is made."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S, isolation_level=None)


def _accounts(connection: sqlite3.Connection, clients: Sequence[int] | None = None) -> list[Account]:
    """Return what the given clients have spent, or all."""
    only = "" if clients is None else "WHERE client IN (SELECT value FROM json_each(?))"
    rows = connection.execute(
        f"SELECT client, kind, n, noise_multiplier, radius_mode, COUNT(*) FROM charges {only} GROUP BY 1, 2, 3, 4, 5",
        () if clients is None else (json.dumps(list(clients)),),
    )
    return [
        Account(client, Release(Kind(kind), n, nu, RadiusMode(mode)), times)
        for client, kind, n, nu, mode, times in rows
    ]


def _affordable(
    connection: sqlite3.Connection, clients: Sequence[int], cost: Fraction | None, limits: Limits
) -> list[bool]:
    if not limits.any:
        return [True] * len(clients)
    spent: dict[int, Fraction | float] = dict.fromkeys(clients, Fraction(0))
    times = dict.fromkeys(clients, 0)
    for account in _accounts(connection, clients):
        spent[account.client] += account.spent
        times[account.client] += account.times
    return [limits.allow(spent[client], times[client], cost) for client in clients]


def _create(path: Path) -> None:
    """Make an empty ledger in one step, so that nobody ever opens half of one."""
    if not path.parent.is_dir():
        raise LedgerError(f"the folder of the ledger {path} is not there; make it, or set ledger-path")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    scratch = Path(name)
    try:
        connection = sqlite3.connect(scratch, isolation_level=None)
        connection.execute("PRAGMA synchronous = EXTRA")
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {_VERSION}")
        connection.executescript(_SCHEMA)
        connection.close()
        with suppress(FileExistsError):
            os.link(scratch, path)  # unlike a rename, this never replaces another process's ledger
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be made: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def _check(path: Path) -> None:
    """Raise unless the file is a whole ledger of this version; never write to it."""
    if not path.exists():
        raise LedgerError(f"there is no ledger {path}; a new one is made by: python -m privacy ledger create PATH")
    if not path.is_file():
        raise LedgerError(f"the ledger {path} is not a file")
    if path.stat().st_size == 0:
        raise LedgerError(f"the ledger {path} is empty: charges may be lost; restore it from a backup")
    # Read by hand: a charge that was cut off is rolled back when SQLite opens the file, and a file
    # that is not ours must not be touched.
    with path.open("rb") as file:
        header = file.read(100)
    if not header.startswith(b"SQLite format 3\0") or int.from_bytes(header[68:72], "big") != _APPLICATION:
        raise LedgerError(f"{path} is not umbel's ledger; set ledger-path to another file")
    if (version := int.from_bytes(header[60:64], "big")) != _VERSION:
        raise LedgerError(f"the ledger {path} is of version {version}, this umbel reads {_VERSION}; upgrade umbel")
    try:
        connection = _connect(path)
        try:
            faults = [fault for (fault,) in connection.execute("PRAGMA quick_check")]
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise LedgerError(f"the ledger {path} is damaged ({error}); restore it from a backup") from error
    if faults != ["ok"]:
        raise LedgerError(f"the ledger {path} is damaged ({faults[0].splitlines()[-1]}); restore it from a backup")
