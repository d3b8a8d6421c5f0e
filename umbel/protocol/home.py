"""Where umbel keeps its files, and how it writes them."""

from __future__ import annotations

import os
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


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or the next run, sees the old or the new one, never half."""
    # A name of the process's own, should two write the same file.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
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
