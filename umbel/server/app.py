"""The ServerApp: a run from its configuration to its folder."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from umbel.nodes.roster import Roster
from umbel.protocol import logs
from umbel.protocol.log import log
from umbel.protocol.plugins import trust
from umbel.protocol.ranges import columns_in
from umbel.protocol.release import Clipping
from umbel.server.callbacks import Checkpoints, Log, Released, Sites, named
from umbel.server.history import State
from umbel.server.report import View, render
from umbel.server.run import Run, initial_hypotheses
from umbel.server.run_folder import RunFolder, versions
from umbel.server.runs import home_of_runs, run_named
from umbel.server.setup import Saved, Setup
from umbel.server.summary import Summary
from umbel.strategies import Callback
from umbel.strategies.differences import prior_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy in the run config."""
    trust(*context.run_config.values())
    conduct(grid, Setup.parse(context.run_config), context.run_id)


def conduct(grid: Grid, setup: Setup, run_id: int, watching: Sequence[Callback] = ()) -> Path:
    """Conduct a run on the nodes of a grid, and return its folder; `watching` has further callbacks.

    Raises `ConfigError` if the run config names something that does not fit, and `FleetError` if the nodes that the run
    needs are missing, or return nothing.
    """
    callbacks, roster = named(setup), _announce(setup, grid)
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
            state = State.first(initial_hypotheses(setup, grid, folder.path.name))
        callbacks = (*callbacks, Log(summary), Checkpoints(), Sites(), Released(), *watching)
        run = Run(setup, grid, state, callbacks, folder.path.name, folder)
        run.do()
        spent, worth = setup.fleet.participations, folder.read_worth()
        view = View(folder.path.name, summary, state, spent, setup.config.entries(), worth)
        folder.write_report(render(view, versions()))
        _tell(summary, view)
        prior = prior_of(setup.strategy.state, len(next(iter(state.best.values()))))
        about = None if prior is None else prior.arrays
        if not columns_in(setup.config.model):  # a question leaves nothing for sites to keep
            setup.fleet.send_best(grid, state.best, setup.config.round_timeout, run.name, about)
        if setup.manifest and not columns_in(setup.config.model):
            log(INFO, "To predict with it: umbel predict %s ROWS, where ROWS is a table or a dataset", run.name)
        log(INFO, "The results are in this folder; open report.html first:")
        log(INFO, "%s", folder.path)
        return folder.path


def _tell(summary: Summary, view: View) -> None:
    """Log the report's warnings, the outcome, and the guarantee."""
    history = view.state.history
    exact = max(entry.exact_reports for entry in history)
    for alarm in view.alarms:
        log(WARNING, "%s: %s", alarm.title, alarm.text)
    often = history[-1].max_participations, exact, summary.left(history)
    for line in [*summary.outcome_lines(view.state), *summary.privacy_lines(*often)]:
        log(INFO, "%s", line)


def _announce(setup: Setup, grid: Grid) -> Roster:
    """Say what will run, with warnings about settings that have no effect, and return its nodes."""
    config, strategy = setup.config, setup.strategy
    text = "%s: k = %d hypotheses, %d clients a round, clipping %s"
    log(INFO, text, type(strategy).__name__, strategy.hypotheses, config.clients_per_round, config.clipping.mode)
    if config.protect.clients and not config.noise_multiplier and config.clipping.mode is Clipping.PUBLIC:
        neither = "clipping=update choice-epsilon=0"
        log(WARNING, "Without noise, updates are still clipped and choices still randomised. To stop both: %s", neither)
    if setup.first:
        text = "The run starts from hypotheses of %s; its guarantee does not count what clients spent there"
        log(INFO, text, config.start_from)
        if setup.model.local_shapes:
            log(WARNING, "Clients start with new local parameters; those of that run are not reused")
    roster = setup.fleet.roster(grid)
    if config.patience and not roster.validation:
        text = "patience = %d has no effect without validation clients: the run does all its rounds"
        log(WARNING, text, config.patience)
    return roster


def _resume(setup: Setup, grid: Grid) -> State:
    """Return the state of an interrupted run after its last finished round."""
    saved = Saved.of(setup)
    state = saved.restore(grid)
    log(INFO, "The run continues after round %d", state.history[-1].number)
    log(INFO, "Results go to %s", saved.folder.path)
    if setup.fleet.roster(grid).simulated:  # a site keeps all that on its disk
        text = (
            "Its simulated nodes are new: their counts for their policy's limits (UMBEL_MAX_PARTICIPATIONS, "
            "UMBEL_BUDGET, ...) start from 0 again. The run config's max-participations is not reset."
        )
        log(WARNING, text)
        if setup.model.local_shapes:
            log(WARNING, "Its clients start with new local parameters: the result differs from an uninterrupted run's")
    return state


def _name(setup: Setup, run_id: int) -> str:
    """Return a name that sorts by time and distinguishes runs of the same second."""
    what = setup.manifest.name if setup.manifest else setup.model.name
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{what}-{setup.config.strategy_name}")
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{plain}-{run_id % 10**6:06d}"
