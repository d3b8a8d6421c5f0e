"""The report of a run that has none: one of a sweep, or one that was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import safetensors
import typer

from protocol.cli import errors_in_one_line
from protocol.errors import ConfigError
from server.report import render
from server.run_folder import RunFolder
from server.setup import Setup
from server.snapshots import Snapshots
from server.summary import Summary


def report(run: Annotated[Path, typer.Argument(help="Folder of a run.", exists=True, file_okay=False)]) -> None:
    """Write the report.html of a run that has none: one of a sweep, or one that was interrupted."""
    with errors_in_one_line():
        typer.echo(write_report(run.absolute()))


def write_report(run: Path) -> Path:
    """Write the report of the run in a folder, from what it left behind, and return its path.

    Raises
    ------
    ConfigError
        When the folder holds no run that has finished a round.
    """
    folder = RunFolder(run)
    try:
        saved = folder.read_config()
        config = saved["config"]
        setup = Setup.parse(config)
        state, spent, _ = folder.read(list(setup.model.shapes))
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{run} holds no run that finished a round: {error}; give the folder of one run") from error
    state.stopped = state.stopped or "it was interrupted"
    clients = setup.manifest.train if setup.manifest else max(spent, default=-1) + 1
    participations = np.zeros(clients, np.int64)
    participations[list(spent)] = list(spent.values())
    releases = run / "releases.safetensors"
    snapshots = Snapshots.of_bytes(state, releases.read_bytes()) if releases.exists() else Snapshots(state)
    summary = Summary(setup.model, setup.manifest, setup.release)
    page = render(
        run.name, summary, state, participations, snapshots, config, saved["versions"], folder.read_sections()
    )
    folder.write_report(page)
    return run / "report.html"
