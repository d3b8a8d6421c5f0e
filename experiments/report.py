"""The report of a run that has none: one of a sweep, or one that was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import safetensors
import typer

from protocol.errors import ConfigError, FederationError
from protocol.messages import price
from server.plane import Album
from server.report import render
from server.rounds import reason
from server.run_folder import RunFolder
from server.settings import Settings
from server.summary import Narrator


def report(run: Annotated[Path, typer.Argument(help="Folder of a run.", exists=True, file_okay=False)]) -> None:
    """Write the report.html of a run that has none: one of a sweep, or one that was interrupted."""
    try:
        path = write_report(run.absolute())
    except (ConfigError, FederationError, OSError, KeyError, safetensors.SafetensorError) as error:
        typer.echo(f"report: {run}: {error}; give the folder of one run", err=True)
        raise typer.Exit(1) from None
    typer.echo(path)


def write_report(run: Path) -> Path:
    """Write the report of the run in a folder, from what it left behind, and return its path."""
    folder = RunFolder(run)
    saved, state, spent = folder.read()
    config = saved["config"]
    settings = Settings.parse(config)
    # A file does not keep the order of the model's parameters.
    names = list(settings.model.shapes)
    state.best = {name: state.best[name] for name in names}
    state.hypotheses = {name: state.hypotheses[name] for name in names}
    state.stopped = state.stopped or reason(settings, state)
    clients = settings.manifest.train if settings.manifest else max(spent, default=-1) + 1
    participations = np.zeros(clients, np.int64)
    participations[list(spent)] = list(spent.values())
    releases = run / "releases.safetensors"
    album = Album.of_bytes(state, releases.read_bytes()) if releases.exists() else Album(state)
    cost = price(settings.model.num_parameters, float(config["noise-multiplier"]))
    narrator = Narrator(settings.model, settings.manifest, cost, settings.strategy.radius.mode)
    folder.write_report(render(run.name, narrator, state, participations, album, config, saved["versions"]))
    return run / "report.html"
