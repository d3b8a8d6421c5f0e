"""The ServerApp: a run from its configuration to its folder."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from umbel.nodes.differences import prior_of
from umbel.protocol import logs
from umbel.protocol.errors import DiskError
from umbel.protocol.log import log
from umbel.protocol.plugins import trust
from umbel.protocol.release import Clipping
from umbel.server.history import State
from umbel.server.observer import Observer, Run
from umbel.server.observers import Checkpoints, Log, Released, Sites, named
from umbel.server.report import View, render
from umbel.server.rounds import initial_hypotheses, run_rounds
from umbel.server.run_folder import RunFolder, Section, versions
from umbel.server.runs import home_of_runs, run_named
from umbel.server.saved import Saved
from umbel.server.setup import Setup
from umbel.server.summary import Summary

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy in the run config."""
    trust(*context.run_config.values())
    conduct(grid, context.run_config, context.run_id)


def conduct(grid: Grid, run_config: Mapping[str, Any], run_id: int, watching: Sequence[Observer] = ()) -> Path:
    """Conduct a run on the nodes of a grid, and return its folder.

    Parameters
    ----------
    grid : Grid
    run_config : mapping
    run_id : int
    watching : sequence of Observer
        Observers in addition to those of the run config.

    Raises
    ------
    ConfigError
        If the run config is invalid.
    FleetError
        If the nodes that the run needs are missing, or return nothing.
    """
    setup = Setup.parse(run_config)
    observers = [*named(setup)]
    name, config = type(setup.strategy).__name__, setup.config
    text = "%s: k = %d hypotheses, %d clients a round, clipping %s"
    log(INFO, text, name, setup.strategy.hypotheses, config.clients_per_round, config.schedule.mode)
    if setup.config.protect.clients and not setup.config.noise_multiplier and setup.config.clipping is Clipping.PUBLIC:
        neither = "clipping=update choice-epsilon=0"
        log(WARNING, "Without noise, updates are still clipped and choices still randomised. To stop both: %s", neither)
    if setup.first:
        log(
            INFO,
            "The run starts from hypotheses of %s; its guarantee does not count what clients spent there",
            setup.config.start_from,
        )
        if setup.model.local_shapes:
            log(WARNING, "Clients start with new local parameters; those of that run are not reused")
    roster = setup.fleet.roster(grid)
    if setup.config.patience and not roster.validation:
        text = "patience = %d has no effect without validation clients: the run does all its rounds"
        log(WARNING, text, setup.config.patience)
    if not roster.simulated:
        logs.configure()
        logs.about(run=run_id)
    summary = Summary.of(setup)
    with ExitStack() as held:
        if setup.config.resume:
            folder = RunFolder(run_named("resume", setup.config.resume))
            held.enter_context(folder.held())
            state = _resume(setup, grid)
            folder.write_worth(None)
        else:
            folder = RunFolder.make(home_of_runs(), _name(setup, run_id))
            folder.write_config(setup.config.entries(), **setup.digests)
            folder.write_manifest(setup.manifest)
            held.enter_context(folder.held())
            log(INFO, "Results go to %s", folder.path)
            start = initial_hypotheses(setup, grid, folder.path.name)
            state = State(hypotheses=start, best=start)
        checkpoints = held.enter_context(Checkpoints())
        sites = Sites()
        observers += [Log(summary), checkpoints, sites, Released(), *watching]
        run = Run(setup, grid, state, observers, folder.path.name, folder)
        held.enter_context(sites.until_end(run))
        try:
            run_rounds(run)
        except DiskError as error:
            log(ERROR, "%s", error)
            log(
                ERROR,
                "The run ends with its last saved round. Resume it once there is room: resume=%r",
                folder.path.name,
            )
            raise

        sections = [section for observer in observers if (section := _section(observer)) is not None]
        folder.write_sections(sections)
        participations = setup.fleet.participations
        view = View(folder.path.name, summary, state, participations, dict(run_config))
        view.worth = folder.read_worth()
        folder.write_report(render(view, versions(), sections))
        prior = prior_of(setup.strategy.state, len(next(iter(state.best.values()))))
        setup.fleet.send_best(grid, state.best, setup.config.round_timeout, run.name, prior)
        last, exact = state.history[-1], max(entry.exact_reports for entry in state.history)
        for line in summary.guarantee_lines(last.max_participations, exact, summary.left(state.history)):
            log(INFO, line)
        log(INFO, "The results are in this folder; open report.html first:")
        log(INFO, "%s", folder.path)
        return folder.path


def _section(observer: Observer) -> Section | None:
    """Return an observer's section for the report; none, with an error in the log, if it fails.

    The run is over, and its results must still reach the folder and the sites.
    """
    name = type(observer).__name__
    try:
        section = observer.section()
    except Exception:
        log(ERROR, "the report lacks the section of %s, which fails", name, exc_info=True)
        return None
    if section is None or isinstance(section, Section):
        return section
    text = "the report lacks the section of %s: it must return umbel.server.observer.Section or None, not %s"
    log(ERROR, text, name, type(section).__name__)
    return None


def _resume(setup: Setup, grid: Grid) -> State:
    """Return the state of an interrupted run after its last finished round."""
    saved = Saved.of(setup)
    setup.fleet.resume(grid, saved.nodes, saved.spent)
    setup.strategy.state = saved.kept
    # An evaluation at the end belongs to no round of the resumed run, and must not stand for the next one.
    saved.folder.write_latest(saved.state, saved.kept)
    log(INFO, "The run continues after round %d", len(saved.state.history))
    log(INFO, "Results go to %s", saved.folder.path)
    if setup.fleet.roster(grid).simulated:  # a site keeps all that on its disk
        text = (
            "Its simulated nodes are new: their counts for their policy's limits (UMBEL_MAX_PARTICIPATIONS, "
            "UMBEL_BUDGET, ...) start from 0 again, unless UMBEL_LEDGER_PATH names a ledger on disk. The run config's "
            "max-participations is not reset."
        )
        log(WARNING, text)
        if setup.model.local_shapes:
            log(WARNING, "Its clients start with new local parameters: the result differs from an uninterrupted run's")
    return saved.state


def _name(setup: Setup, run_id: int) -> str:
    """Return a name that sorts by time and distinguishes runs of the same second."""
    what = setup.manifest.name if setup.manifest else setup.model.name
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{what}-{setup.config.strategy_name}")
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{plain}-{run_id % 10**6:06d}"
