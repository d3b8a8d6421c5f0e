"""The ServerApp: a run from its configuration to its folder."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import safetensors
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from federation import digest_of, find_federation
from protocol.errors import ConfigError
from protocol.flower import log, pull_soon
from server.history import State
from server.observers import Checkpoints, Log, Patience, Released
from server.report import View, render
from server.rounds import Run, initial_hypotheses, run_rounds
from server.rules_of_thumb import RulesOfThumb
from server.run_folder import RunFolder, versions
from server.runs import home_of_runs, run_named
from server.setup import Setup
from server.snapshots import Snapshots
from server.summary import Summary

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy that the run config names."""
    pull_soon()
    conduct(grid, context.run_config, context.run_id)


def conduct(grid: Grid, run_config: Mapping[str, Any], run_id: int) -> Path:
    """Do a run on the nodes of a grid, and return the folder that it leaves behind.

    Raises
    ------
    ConfigError
        When it cannot be run.
    FleetError
        When the nodes that it needs are not there, or give nothing.
    """
    setup = Setup.parse(run_config)
    setup.strategy.summary()
    if setup.first:
        log(INFO, "It starts from hypotheses of %s; what clients gave away there comes on top", setup.config.start_from)
    setup.strategy.fleet.roster(grid)
    summary = Summary(setup.model, setup.manifest, setup.release)
    if setup.config.resume:
        folder, state, snapshots = _resume(setup, grid)
    else:
        folder = RunFolder.make(home_of_runs(), _name(setup, run_id))
        folder.write_config(setup.config.entries(), **_digests(setup))
        log(INFO, "Results go to %s", folder.path)
        start = initial_hypotheses(setup, grid, folder.path.name)
        state = State(hypotheses=start, best=start)
        snapshots = Snapshots(state)
    observers = [Patience(setup.config.patience), *setup.observers, Log(summary), Checkpoints(snapshots), Released()]
    observers.append(RulesOfThumb())
    run = Run(setup, grid, state, observers, folder.path.name, folder)
    run_rounds(run)

    sections = [section for observer in observers if (section := observer.section()) is not None]
    folder.write_sections(sections)
    participations = setup.strategy.fleet.participations
    view = View(folder.path.name, summary, state, participations, snapshots, dict(run_config))
    folder.write_report(render(view, versions(), sections))
    setup.strategy.fleet.send_best(grid, state.best, setup.config.round_timeout, run.name)
    for line in summary.closing_lines(state):
        log(INFO, line)
    log(INFO, "The results are in this folder; open report.html first:")
    log(INFO, "%s", folder.path)
    return folder.path


# What may change when a run goes on.
_FREE = {
    "resume", "rounds", "patience", "validate-every", "observers", "min-releases", "device", "engine", "min-nodes",
    "node-wait", "round-timeout", "quorum", "max-clients-per-node", "max-node-share", "max-update-norm", "track",
    "track-options",
}  # fmt: skip


def _resume(setup: Setup, grid: Grid) -> tuple[RunFolder, State, Snapshots]:
    """Return the folder of an interrupted run and where it stands, after its last finished round."""
    path = run_named("resume", setup.config.resume)
    folder = RunFolder(path)
    try:
        saved = folder.read_config()
        state, spent, kept = folder.read(list(setup.model.shapes))
        nodes = folder.read_nodes()
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        raise ConfigError(f"resume: {path} holds no run that finished a round: {error}") from error
    config = setup.config.entries()
    for key, was in saved["config"].items():
        if key not in _FREE and config.get(key) != was:
            raise ConfigError(f"resume: {key} was {was!r} and is {config.get(key)!r}; set it as it was")
    if (data := _digests(setup)["data"]) and saved.get("data", data) != data:
        raise ConfigError(
            f"resume: the rows of federation {setup.config.federation!r} are others than those that the run began "
            f"with; put these back, or start a new run: start-from={path.name} seed={setup.config.seed + 1}"
        )
    # Entries after the last round of training evaluate what it left, and come again at the end.
    over = not state.history[-1].asked or not state.best_round
    while not state.history[-1].asked:
        state.history.pop()
    if len(state.history) > setup.config.rounds or (over and len(state.history) == setup.config.rounds):
        raise ConfigError(f"resume: the run has done its {len(state.history)} rounds; raise rounds to go on")
    state.stopped = ""
    setup.strategy.fleet.resume(grid, nodes, spent)
    setup.strategy.state = kept
    releases = path / "releases.safetensors"
    snapshots = Snapshots.of_bytes(state, releases.read_bytes()) if releases.exists() else Snapshots(state)
    log(INFO, "The run goes on after round %d", len(state.history))
    log(INFO, "Results go to %s", path)
    if setup.model.local_shapes and setup.strategy.fleet.roster(grid).simulated:
        log(WARNING, "Simulated clients kept their local parameters for as long as their nodes ran: they start anew.")
    return folder, state, snapshots


def _digests(setup: Setup) -> dict[str, str]:
    """Return digests of data and frozen parameters; the first is empty where every node serves its own."""
    name = setup.config.federation
    return {"data": digest_of(find_federation(name)) if name else "", "frozen": setup.model.frozen_digest}


def _name(setup: Setup, run_id: int) -> str:
    """Return a name that sorts by time and tells runs of one second apart."""
    what = setup.manifest.name if setup.manifest else setup.model.name
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{what}-{setup.config.strategy}")
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{plain}-{run_id % 10**6:06d}"
