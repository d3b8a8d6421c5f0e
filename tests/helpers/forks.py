"""Processes that start with everything imported already, and Flower's command in such a process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar

from umbel.protocol.flower import identify

T = TypeVar("T")


@cache
def forks() -> ForkServerContext:
    """Return what makes processes out of one that has imported the app and Flower's command."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["umbel.client.app", "umbel.simulation.grid", "flwr.cli.app", __name__])
    return context


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """Return what a module's function returns in a process of this project's own, whose memory holds nothing else."""
    with forks().Pool(1, initializer=identify) as pool:
        return pool.apply(function, arguments)


def flwr(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run ``flwr`` in a folder, with nothing but this in its environment; raise when it takes longer than `timeout`."""
    with tempfile.TemporaryDirectory() as scratch:
        said = [Path(scratch, name) for name in ("stdout", "stderr")]
        process = forks().Process(target=_flwr, args=(arguments, dict(environment), folder, *said))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(["flwr", *arguments], timeout)
        output, errors = (file.read_text(encoding="utf-8") for file in said)
    return subprocess.CompletedProcess(["flwr", *arguments], process.exitcode, output, errors)


def _flwr(arguments: Sequence[str], environment: dict[str, str], folder: Path, output: Path, errors: Path) -> None:
    from flwr.cli.app import app
    from flwr.supercore.credential_store import file_credential_store

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, file in enumerate((Path(os.devnull), output, errors)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), descriptor)
    # Flower asks once, when it is imported, where its home is.
    file_credential_store.CREDENTIAL_FILE_PATH = Path(environment["FLWR_HOME"]) / "credentials.yaml"
    sys.argv = ["flwr", *arguments]
    app()
