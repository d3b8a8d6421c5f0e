"""Reports of runs: of one that has none yet, and of one beside others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import safetensors
import typer

from umbel.client.engines import learner_for
from umbel.client.learner import best_hypothesis
from umbel.protocol.cli import command_line, errors_in_one_line
from umbel.protocol.errors import ConfigError, DatasetError
from umbel.research.experiments.baselines import local_only, measure, validation_cohort
from umbel.research.experiments.runs import LOCAL_ONLY
from umbel.server.report import HeldOut, Measured, View, check, render
from umbel.server.report.compare import MAX_KINDS, runs_of
from umbel.server.run_folder import RunFolder
from umbel.server.runs import find_run
from umbel.server.setup import Setup
from umbel.server.snapshots import Snapshots
from umbel.server.summary import Summary
from umbel.simulation.in_process import play

FEDAVG = "fedavg"


def write_report(run: str | Path, against: Sequence[str | Path] = ()) -> Path:
    """Write the report of a run, by its name or its folder, from what it left behind, and return its path.

    Of a simulation whose dataset is on this machine, the report also says which hypotheses fit the validation clients,
    and how the run serves them on rows held out. Of sites' own data the server knows neither.

    It compares the run with those that `against` names, seeds together. ``"fedavg"`` and ``"local-only"`` stand for
    these baselines, made here from the run's config, where its dataset is on this machine: FedAvg takes about as long
    as the run did. Raises `ConfigError` when a folder holds no run that has finished a round, or a run is of other
    data.
    """
    folder, setup, view = _open(run)
    others = [_baseline(setup) if one == FEDAVG else _open(one)[2] for one in against if one != LOCAL_ONLY]
    for other in others:
        check(view, other)
    if len(runs_of(view, others)) > MAX_KINDS + 1:
        text = f"a report compares a run with at most {MAX_KINDS} kinds of others; leave some out"
        raise ConfigError(text, code="config.too-many-runs")
    alone = None
    if LOCAL_ONLY in against:
        _needs_data(setup, LOCAL_ONLY)
        dataset = setup.open_dataset()
        assert dataset is not None
        try:
            alone = _held_out(local_only(setup.model, dataset, setup.config))
        except DatasetError as error:
            raise DatasetError.of(error, f"leave out {LOCAL_ONLY}: ") from error
    page = render(view, folder.read_config()["versions"], folder.read_sections(), others, alone)
    folder.write_report(page)
    return folder.path / "report.html"


def _open(run: str | Path) -> tuple[RunFolder, Setup, View]:
    """Return a run's folder, what it was, and what its report is made from."""
    path = find_run(str(run))
    folder = RunFolder(path)
    try:
        config = folder.read_run_config()
        setup = Setup.parse(config)
        state, spent, _ = folder.read(list(setup.model.shapes))
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        text = f"{path} holds no run that finished a round: {error}; give the folder of one run"
        raise ConfigError(text, code="config.no-run") from error
    state.stopped = state.stopped or "it was interrupted"
    clients = setup.manifest.train if setup.manifest else max(spent, default=-1) + 1
    participations = np.zeros(clients, np.int64)
    participations[list(spent)] = list(spent.values())
    releases = path / "releases.safetensors"
    snapshots = Snapshots.of_bytes(state, releases.read_bytes()) if releases.exists() else Snapshots(state)
    summary = Summary(setup.model, setup.manifest, setup.release)
    view = View(path.name, summary, state, participations, snapshots, config)
    # A dataset of the same name may lie here without being what sites trained on.
    nodes = folder.read_nodes() if (path / "nodes.json").exists() else []
    if all(hosting.simulated for _, hosting in nodes):
        view.measured = _measured(setup, view)
    return folder, setup, view


def _baseline(setup: Setup) -> View:
    """Return a run of FedAvg from the same config."""
    _needs_data(setup, FEDAVG)
    none = {"strategy-options": "", "observers": "", "track": "", "track-options": "", "resume": ""}
    config = setup.config.entries() | {"strategy": FEDAVG, "hypotheses": 1} | none
    run = play(config)
    summary = Summary(run.setup.model, run.setup.manifest, run.setup.release)
    view = View(FEDAVG, summary, run.state, run.fleet.participations, Snapshots(run.state), config)
    view.measured = _measured(run.setup, view)
    return view


def _needs_data(setup: Setup, what: str) -> None:
    if setup.manifest is None:
        text = f"{what} needs the clients' rows, and each site has its own; give a run of it instead"
        raise ConfigError(text, code="config.no-data-here")


def _measured(setup: Setup, view: View) -> Measured | None:
    """Measure a run on the rows of validation clients; None where they are not on this machine."""
    dataset = setup.open_dataset()
    model, best = setup.model, view.state.best
    if dataset is None or not dataset.manifest.split["validation"]:
        return None
    held_out = _held_out(measure(model, dataset, best, setup.config.step_size)["held_out"])
    if view.k == 1 or model.local_shapes:
        return Measured(held_out)
    learner = learner_for(model)
    losses, _ = learner.score(best, validation_cohort(dataset, learner))
    chosen = best_hypothesis(losses)
    own = [losses[j, chosen == j].mean() if (chosen == j).any() else np.nan for j in range(view.k)]
    return Measured(held_out, np.bincount(chosen, minlength=view.k).tolist(), own, losses.mean(axis=1).tolist())


def _held_out(told: Mapping[str, float]) -> HeldOut | None:
    clients = int(told["clients"])
    return HeldOut(told["mean"], told["worst_decile"], clients) if clients else None


def main(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run: its name, its path, or last.")] = "last",
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Another run of the same data; fedavg or local-only to make that baseline here. May be given often.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the report.html of a run, beside others: one that was interrupted, or one of a sweep, has none yet."""
    with errors_in_one_line():
        typer.echo(write_report(run, against or ()))


app = command_line(main)
