"""A process that ends while it writes what a run leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from umbel.server import run_folder


class Killed(BaseException):
    """Stands for whatever ends a process."""


def kill_when(patch: pytest.MonkeyPatch, over: Callable[[Path], bool]) -> None:
    """End the process at the first write for which `over` says so: before a file is replaced, or amid a new line."""

    def replace(path: Path, content: bytes, private: bool) -> None:
        if over(path):
            raise Killed
        whole(path, content, private)

    def add(path: Path, content: bytes) -> None:
        if over(path):
            append(path, content[: len(content) // 2])
            raise Killed
        append(path, content)

    whole, append = run_folder.write_atomically, run_folder.append
    patch.setattr(run_folder, "write_atomically", replace)
    patch.setattr(run_folder, "append", add)
