"""The disk of a server's database: whether it has room and can be written, and what the server does without.

On a full or read-only disk no reply can be stored. Then the server answers 503, so that sites and the ServerApp try
again, and the log says why, once. As long as a little room is left, only sites have to wait: a run can still end with
its reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Pool, event

from umbel.deploy.listening import option
from umbel.protocol.errors import DiskError, ServerError, UmbelError
from umbel.protocol.flower import log
from umbel.protocol.home import LAST_ROOM, LEAST_ROOM, check_room, disk_error

_RECENT_S = 60.0
"""Seconds after a failed write for which the disk counts as full: some limits do not show in its free space."""

_LOCKED_S = 30.0
"""Seconds that a request waits to write to the database; Flower gives up after 5 seconds."""

_URL = "sqlite:///"


class Database:
    """A server's database file; None for a database in memory."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self._clock = path, clock
        self._failed: tuple[float, DiskError] | None = None
        self._told = False

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Database:
        """Return the database that options of Flower's SuperLink name."""
        name = option(arguments, "--database").removeprefix(_URL)
        return cls(Path(name).absolute() if name and not name.startswith(":") else None)

    def check(self) -> None:
        """Raise unless the file can be made and written."""
        if self.path is None:
            return
        if not self.path.parent.is_dir():
            text = f"there is no folder {self.path.parent} for the server's database; make it, or change --database"
            raise ServerError(text, code="server.database")
        check_room(self.path, LEAST_ROOM)

    def fault(self) -> UmbelError | None:
        """Return the error of a full or read-only disk; the log tells when that changes."""
        fault = self._fault()
        if (fault is not None) != self._told:
            if fault:
                log(ERROR, "%s", fault)
                log(ERROR, "Until it can be written, sites wait. Runs that end meanwhile can be resumed.")
            else:
                log(INFO, "The server's disk can be written again")
            self._told = fault is not None
        return fault

    def watch(self) -> None:
        """From here on, answer requests for which there is no room with 503, wait longer to write, and shrink files."""
        for kind, what, listener in self.listeners:
            event.listen(kind, what, listener)

    @property
    def listeners(self) -> tuple[tuple[type, str, Callable[..., None]], ...]:
        """Functions that SQLAlchemy calls for every database of this process."""
        return (Engine, "handle_error", self._failing), (Engine, "connect", _shrink), (Pool, "checkout", _be_patient)

    def _fault(self) -> UmbelError | None:
        if self.path is None:
            return None
        if self.path.exists() and not os.access(self.path, os.W_OK):
            text = f"the server's database {self.path} cannot be written: its disk is read-only, or another user's"
            return ServerError(f"{text}; mount it again, or chown", code="server.database")
        try:
            check_room(self.path, LAST_ROOM)
        except DiskError as error:
            return error
        if self._failed and self._clock() < self._failed[0] + _RECENT_S:
            return self._failed[1]
        return None

    def _failing(self, context: Any) -> None:
        from fastapi import HTTPException  # as Flower has done by now

        if error := disk_error(context.original_exception, self.path or "the database"):
            self._failed = self._clock(), error
            self.fault()
            raise HTTPException(503, f"the server's disk is full; it tries again [{error.code}]")


def _shrink(connection: Any, _record: Any) -> None:
    """In a new database, remove content that has been read from the disk too; Flower's own settings come later."""
    connection.execute("PRAGMA auto_vacuum = FULL")


def _be_patient(connection: Any, _record: Any, _proxy: Any) -> None:
    connection.execute(f"PRAGMA busy_timeout = {1000 * _LOCKED_S:.0f}")
