"""Room on a site's disk that is kept free for the line of a message in the site's log.

A client is charged before it trains, and the log's line comes last. If the disk filled up in between, the client would
have been charged for a release that may not leave. So the site answers only while a file of fixed size lies beside the
ledger. A line for which there is no other room takes the place of that file.

Whenever the disk was full, the file goes. While it cannot be written again, with as much room besides, the site answers
nothing and charges no client.
"""

from __future__ import annotations

import os
from pathlib import Path

from umbel.protocol.errors import DiskError
from umbel.protocol.home import free_space, free_text, told_if_full

_SIZE = 1 << 20
"""Bytes of the file: more than two of the longest lines, and more than the charges of 10,000 clients."""


class Reserve:
    """The file that keeps room for the site with that ledger."""

    def __init__(self, ledger: Path) -> None:
        self.path = ledger.with_name(f"{ledger.name}.reserve")

    def keep(self) -> None:
        """Make the file if there is none; raise `DiskError` unless it is there, with as much free room besides."""
        if not self._there():
            self._make()
        self.look()

    def look(self) -> None:
        """Raise `DiskError` unless `keep` has room for the file and as much besides; nothing is written."""
        if free_space(self.path) < (_SIZE if self._there() else 2 * _SIZE):
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
        return self.path.is_file() and self.path.stat().st_size >= _SIZE

    def _make(self) -> None:
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            scratch.unlink(missing_ok=True)
            with (
                told_if_full(self.path),
                open(scratch, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)) as file,
            ):
                # Random bytes, since some file systems keep others in less room.
                file.write(os.urandom(2 * _SIZE))
                file.flush()
                os.fsync(file.fileno())
                file.truncate(_SIZE)
            scratch.replace(self.path)
        finally:
            scratch.unlink(missing_ok=True)
