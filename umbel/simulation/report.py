"""The report of a run from its folder, with its worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from umbel.protocol.cli import command_line
from umbel.server.report import View, render
from umbel.server.run_folder import RunFolder
from umbel.server.runs import find_run, opening, reading
from umbel.server.setup import Setup
from umbel.server.summary import Summary
from umbel.simulation.worth import appraise


def write_report(run: str | Path, baselines: bool = True) -> Path:
    """Write the report of a run, by its name or its folder, and return its path.

    With `baselines`, a missing measurement of the worth of a simulation, whose dataset is on this machine, is made and
    saved (`umbel.simulation.worth`). Raises `ConfigError` if the folder holds no run with a finished round.
    """
    path = find_run(str(run))
    folder = RunFolder(path)
    with opening(path):
        config, setup = folder.read_run_config(), Setup.of_run(folder)
        state, spent, kept = folder.read(setup.model.shapes)
        folder.check_releases(spent, state.history)
        participations = np.zeros(setup.manifest.train if setup.manifest else max(spent, default=-1) + 1, np.int64)
        participations[list(spent)] = list(spent.values())
    state.stopped = state.stopped or "it was interrupted"
    worth = folder.read_worth()
    if worth is None or worth.rounds != len(state.history):
        worth = None
        if baselines and _same_data(folder, setup):
            worth = appraise(setup, state, kept)
            folder.write_worth(worth)
    view = View(path.name, Summary.of(setup), state, participations, config, worth)
    folder.write_report(render(view, folder.read_config()["versions"]))
    return path / "report.html"


def _same_data(folder: RunFolder, setup: Setup) -> bool:
    """Return whether a simulation's data are here unchanged: another dataset of the same name may be here."""
    nodes = folder.read_nodes() if (folder.path / "nodes.json").exists() else []
    if setup.manifest is None or not all(hosting.simulated for _, hosting in nodes):
        return False
    return bool(folder.read_config().get("data") == setup.digests["data"])


@command_line
def app(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run: its name, its path, or last.")] = "last",
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="Measure the run's worth, if that was not done.")
    ] = True,
) -> None:
    """Write the report.html of a run. Interrupted runs and runs of a sweep have none yet."""
    with reading(run):
        typer.echo(write_report(run, baselines))
