"""The folder of umbel's files, and safe ways to write them."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from umbel.protocol.errors import ConfigError, DiskError

LEAST_ROOM, LAST_ROOM = 32 << 20, 16 << 20
"""Free bytes on a server's disk. With less than the first, no round begins. With less than the second, sites' replies
wait, so that a run can still save its end and the reason."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ROOM_IN_SQLITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)


def umbel_home() -> Path:
    """Return the folder of data and runs: ``$UMBEL_HOME``, or ``~/umbel``."""
    home = Path(os.environ.get("UMBEL_HOME") or Path.home() / "umbel").expanduser()
    if not home.is_absolute():
        # A relative path would name a different folder in every process.
        raise ConfigError(f"UMBEL_HOME must be an absolute path, got {str(home)!r}", code="config.home")
    return home


def state_home() -> Path:
    """Return the folder of what umbel notes about files elsewhere: ``umbel`` in ``$XDG_STATE_HOME``."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "umbel"


def make_folder(folder: Path) -> None:
    """Create a folder and those above it. umbel's home, if it is among them, is closed to other users.

    It holds data, clients' names, and runs with exact losses.
    """
    home = umbel_home()
    if home in (folder, *folder.parents):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def make_home_of(file: Path) -> None:
    """Create the folder of a file if it is umbel's home; any other folder must exist.

    A new folder's name is synced to disk. Otherwise a power cut could remove the folder with a ledger in it, and a new
    ledger would begin.
    """
    home = umbel_home()
    if file.parent == home:
        new = [folder for folder in (home, *home.parents) if not folder.exists()]
        make_folder(home)
        for folder in new:
            sync(folder.parent)


def is_full(error: BaseException) -> bool:
    """Return whether an error of the operating system or of SQLite says that there is no room on a disk."""
    if isinstance(error, sqlite3.Error):
        # SQLite has its own code for a full disk, but not for a used-up quota or too large a file.
        return getattr(error, "sqlite_errorcode", 0) in _NO_ROOM_IN_SQLITE
    # NumPy gives no error number, only the size that it could not write.
    return isinstance(error, OSError) and (error.errno in _NO_ROOM or "requested and" in str(error))


def free_space(path: Path) -> int:
    """Return the free bytes of the disk of a file or folder, which need not exist."""
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    return shutil.disk_usage(there).free


def free_text(path: Path) -> str:
    """Return the free space of a file's or folder's disk as text."""
    try:
        return f"{free_space(path) / 2**20:,.1f} MiB free"
    except OSError:  # the folder has just gone
        return "free space unknown"


def disk_error(error: Exception, path: object) -> DiskError | None:
    """Return the error to raise where a file could not be written because its disk is full; None for other reasons."""
    if not is_full(error):
        return None
    left = f" ({free_text(path)})" if isinstance(path, Path) else ""
    text = f"the disk is full{left}, and {path} cannot be written; make room, or set UMBEL_HOME to a folder elsewhere"
    return DiskError(text, code="disk.full")


def check_room(path: Path, needed: int) -> None:
    """Raise `DiskError` if the disk of a file or folder has fewer free bytes than needed."""
    if free_space(path) < needed:
        raise DiskError(
            f"the disk is full ({free_text(path)}, {needed / 2**20:,.0f} MiB needed), so {path} cannot be written; "
            "make room",
            code="disk.full",
        )


@contextmanager
def told_if_full(path: Path) -> Iterator[None]:
    """Raise `DiskError` with a file's or folder's path where there is no room to write it."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path) or error from None


def write_atomically(path: Path, content: bytes, private: bool = False) -> None:
    """Replace a file so that a reader, or the next run, sees the old or the new one, never half.

    At any umask, only the owner may read a `private` file, and no file is world-writable. Raises `DiskError` if the
    disk is full.
    """
    # The name contains the process number, in case two processes write the same file.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    mode = 0o600 if private else 0o664
    try:
        # O_EXCL below: in a folder that others write to, or that was sent, a link may wait under this name.
        scratch.unlink(missing_ok=True)
        with (
            told_if_full(path),
            open(scratch, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, mode)) as file,
        ):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def append(path: Path, content: bytes) -> None:
    """Append to a file and flush to disk; if the process is killed meanwhile, a part may be there.

    Raises `DiskError` if the disk is full. The file is then as it was.
    """
    with told_if_full(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


def sync(path: Path) -> None:
    """Sync a file, or a folder with the names of its files, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def special_file(folder: Path) -> Path | None:
    """Return a pipe or device in a folder, or a link to one, if there is any: reading it may never end."""
    return next((one for one in folder.iterdir() if one.exists() and not (one.is_file() or one.is_dir())), None)
