"""The witness of a journal: its head, in another folder than the journal's."""

from __future__ import annotations

import errno
import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

from umbel.privacy.site.totals import Head, State
from umbel.protocol.errors import LedgerError
from umbel.protocol.home import state_home, sync

_PART = 1 << 16  # bytes of a head
FOLDER = "UMBEL_WITNESS_PATH"

Prices = list[tuple[str, int]]
"""Of each sort of charge the dearest so far, as a release in text, and how many there were."""


def witness_folder() -> Path:
    """Return the folder of witnesses where nothing else is said."""
    return Path(os.environ.get(FOLDER) or state_home())


class Witness:
    """The head of a journal at a path without links, and the dearest charge of each sort with the number of charges.

    It is written after the journal and before a reply leaves. The file has two parts from the start, written in turn:
    so a full disk does not stop it, and a crash in the middle of one leaves the other.
    """

    def __init__(self, journal: Path, folder: Path | None = None) -> None:
        self._journal = journal
        name = sha256(str(journal).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self.path = (folder or witness_folder()) / f"{journal.stem}-{name}.witness"

    def read(self) -> tuple[Head, Prices]:
        """Return head and prices; an empty head if there is none. Raise `LedgerError` if both parts are damaged."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return Head(), []
        heads: list[Any] = []
        for part in (content[:_PART], content[_PART:]):
            text, _, seal = part.partition(b"\n")[0].rpartition(b" ")
            if seal == sha256(text).hexdigest().encode():
                heads.append(json.loads(text))
        if not heads and content.strip(b"\0"):
            fault = f"the ledger {self._journal} is damaged (its witness {self.path} is not whole)"
            raise LedgerError(f"{fault}; run umbel site check --repair NODE_CONFIG", code="ledger.damaged")
        number, size, hash, prices = max(heads) if heads else (*Head(), [])
        return Head(number, size, hash), [(text, times) for text, times in prices]

    def write(self, state: State, alone: bool = False) -> None:
        """Write the head of a state; on return it is on disk. `alone`, nothing is left of any other."""
        text = json.dumps([*state.head, state.all("price")]).encode()
        part = text + b" " + sha256(text).hexdigest().encode() + b"\n"
        if self.path.parent == state_home():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            new = os.fstat(file).st_size < 2 * _PART
            if new or alone:
                write_at(file, bytes(2 * _PART), 0)
            write_at(file, part, state.head.number % 2 * _PART)
            os.fsync(file)
        finally:
            os.close(file)
        if new:
            sync(self.path.parent)


def write_at(file: int, content: bytes, place: int) -> None:
    """Write all of a content; raise where a full disk would take a part of it without an error."""
    if os.pwrite(file, content, place) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
