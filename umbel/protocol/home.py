"""Where umbel keeps its files, and how it writes them."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from umbel.protocol.errors import ConfigError


def umbel_home() -> Path:
    """Return the folder of data and runs: ``$UMBEL_HOME``, or ``~/umbel``."""
    home = Path(os.environ.get("UMBEL_HOME") or Path.home() / "umbel").expanduser()
    if not home.is_absolute():
        # It would mean another folder in every process.
        raise ConfigError(f"UMBEL_HOME must be an absolute path, got {str(home)!r}", code="config.home")
    return home


def make_home_of(file: Path) -> None:
    """Make the folder of a file if it is umbel's home; any other folder must be there."""
    if file.parent == umbel_home():
        file.parent.mkdir(parents=True, exist_ok=True)


def write_atomically(path: Path, content: bytes, private: bool = False) -> None:
    """Replace a file so that a reader, or the next run, sees the old or the new one, never half.

    Only its owner may read a `private` one, at any umask.
    """
    # A name of the process's own, should two write the same file.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    mode = 0o600 if private else 0o666
    try:
        # A file made here alone: in a folder that was sent, or that others write to, a link may wait under this name.
        scratch.unlink(missing_ok=True)
        with open(scratch, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def append(path: Path, content: bytes) -> None:
    """Add to a file, so that it is on the disk; of a process that is killed meanwhile a part may be there."""
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def special_file(folder: Path) -> Path | None:
    """Return a pipe or device in a folder, or a link to one, if there is any: to read it may never end."""
    return next((one for one in folder.iterdir() if one.exists() and not (one.is_file() or one.is_dir())), None)


def private_scratch() -> Path:
    """Return a folder for temporary files that this user's processes share, and no other user can read or prepare."""
    folder = Path(tempfile.gettempdir()) / f"umbel-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    # Others may have made it first: what lies there is theirs.
    return folder if private else Path(tempfile.mkdtemp(prefix="umbel-"))
