"""The SQLite files that a site keeps: made in one step, changed in one step, and never taken for one another."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from umbel.protocol.errors import LedgerError

_BUSY_S = 60.0


def make(path: Path, what: str, application: int, fill: Callable[[sqlite3.Connection], None]) -> bool:
    """Make a file in one step, so that nobody ever opens half of one.

    Parameters
    ----------
    path : Path
        In a folder that is there.
    what : str
        What errors call the file.
    application : int
        By which it is known, in the file's header.
    fill : callable
        Writes its tables.

    Returns
    -------
    bool
        Whether it was made here; False where it is there already.

    Raises
    ------
    LedgerError
        When it cannot be made.
    """
    if not path.parent.is_dir():
        raise LedgerError(f"the folder of {what} is not there; make it, or set ledger-path")
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        os.close(handle)
        scratch = Path(name)
        try:
            connection = sqlite3.connect(scratch, isolation_level=None)
            connection.execute(f"PRAGMA application_id = {application}")
            with transaction(connection, write=True):
                fill(connection)
            with suppress(FileExistsError):
                os.link(scratch, path)  # unlike a rename, this never replaces another process's file
                return True
        finally:
            scratch.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"{what} cannot be made: {error}") from error
    return False


def connect(path: Path) -> sqlite3.Connection:
    """Open a file that is there; none is made."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S, isolation_level=None)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection, write: bool) -> Iterator[sqlite3.Connection]:
    """Have the file stand still, then close it; what was written is on disk afterwards, or none of it is."""
    try:
        # EXTRA also syncs the folder, without which a power cut could bring a journal back.
        connection.execute("PRAGMA synchronous = EXTRA")
        connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        yield connection
        connection.execute("COMMIT")
    finally:
        connection.close()  # rolls back what was not committed


def header(path: Path) -> tuple[int, int] | None:
    """Return application and version of a file, None where it is not SQLite's; raise `OSError` if it cannot be read.

    It is read by hand: what was cut off is rolled back when SQLite opens the file, and a file that is not
    umbel's must not be touched.
    """
    with path.open("rb") as file:
        first = file.read(100)
    if not first.startswith(b"SQLite format 3\0"):
        return None
    return int.from_bytes(first[68:72], "big"), int.from_bytes(first[60:64], "big")
