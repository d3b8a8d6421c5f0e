"""Reports of runs: of one without a report, and of one beside others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from umbel.client.engines import learner_for
from umbel.client.learner import best_hypothesis
from umbel.protocol.arrays import Arrays
from umbel.protocol.cli import command_line, errors_in_one_line
from umbel.protocol.errors import ConfigError, DatasetError
from umbel.protocol.run_config import MAX_HYPOTHESES
from umbel.server.report import HeldOut, Measured, View, check, render
from umbel.server.report.compare import MAX_KINDS, runs_of
from umbel.server.run_folder import RunFolder
from umbel.server.runs import DAMAGE, find_run, reading
from umbel.server.saved import check_releases
from umbel.server.setup import Setup, check_hypotheses
from umbel.server.snapshots import Snapshots
from umbel.server.summary import Summary
from umbel.simulation.baselines import local_only, measure, validation_cohort
from umbel.simulation.in_process import play
from umbel.simulation.measured import LOCAL_ONLY
from umbel.simulation.worth import appraise

FEDAVG = "fedavg"


def write_report(run: str | Path, against: Sequence[str | Path] = (), baselines: bool = True) -> Path:
    """Write the report of a run, by its name or its folder, and return its path.

    For a simulation whose dataset is on this machine, the report also says which hypotheses fit the validation clients,
    and how the run serves them on held-out rows. For sites' own data the server knows neither. With `baselines`, a
    missing measurement of the run's worth is made and saved (`umbel.simulation.worth`).

    It compares the run with those in `against`, seeds together. ``"fedavg"`` and ``"local-only"`` stand for these
    baselines, made here from the run's config, if its dataset is on this machine: FedAvg takes about as long as the run
    did. Raises `ConfigError` if a folder holds no run with a finished round, or a run has other data.
    """
    folder, setup, view, kept = _open(run)
    if made := [one for one in (FEDAVG, LOCAL_ONLY) if one in against]:
        _needs_data(folder, setup, made[0])
    others = []
    for one in against:
        if one == FEDAVG:
            others.append(_baseline(setup))
        elif one != LOCAL_ONLY:
            beside, _, other, _ = _open(one)
            check(view, other)
            if not _alike(folder, beside):
                text = f"{other.name} has other rows than {view.name}, though their datasets have the same name"
                raise ConfigError(f"{text}; compare runs of the same data", code="config.compare")
            others.append(other)
    if len(runs_of(view, others)) > MAX_KINDS + 1:
        text = f"a report compares a run with at most {MAX_KINDS} kinds of others; leave some out"
        raise ConfigError(text, code="config.too-many-runs")
    alone = None
    if LOCAL_ONLY in against:
        dataset = setup.open_dataset()
        assert dataset is not None
        try:
            alone = _held_out(local_only(setup.model, dataset, setup.config))
        except DatasetError as error:
            raise DatasetError.of(error, f"leave out {LOCAL_ONLY}: ") from error
    view.worth = folder.read_worth()
    if view.worth is None or view.worth.rounds != len(view.state.history):
        view.worth = None
        if baselines and _same_data(folder, setup):
            view.worth = appraise(setup, view.state, kept)
            folder.write_worth(view.worth)
    page = render(view, folder.read_config()["versions"], folder.read_sections(), others, alone)
    folder.write_report(page)
    return folder.path / "report.html"


def _open(run: str | Path) -> tuple[RunFolder, Setup, View, Arrays]:
    """Return a run's folder, its setup, the input of its report, and its strategy's state."""
    path = find_run(str(run))
    folder = RunFolder(path)
    try:
        config = folder.read_run_config()
        setup = Setup.of_run(folder)
        state, spent, kept = folder.read(list(setup.model.shapes))
    except (OSError, *DAMAGE) as error:
        text = f"{path} holds no run that finished a round: {error}; give the folder of one run"
        raise ConfigError(text, code="config.no-run") from error
    state.stopped = state.stopped or "it was interrupted"
    clients = setup.manifest.train if setup.manifest else max(spent, default=-1) + 1
    if spent and (last := max(spent)) >= clients:
        text = f"participations.jsonl names client {last}, and the dataset has {clients:,} training clients"
        raise ConfigError(f"{path} is damaged: {text}; restore an intact copy", code="config.run-damaged")
    with reading(path):
        for arrays in (state.hypotheses, state.best):
            check_hypotheses(arrays, setup.model.shapes, MAX_HYPOTHESES)
        check_releases(spent, state.history, folder.read_history(len(state.history))[-1])
    participations = np.zeros(clients, np.int64)
    participations[list(spent)] = list(spent.values())
    releases = path / "releases.safetensors"
    snapshots = Snapshots.of_bytes(state, releases.read_bytes()) if releases.exists() else Snapshots(state)
    summary = Summary.of(setup)
    view = View(path.name, summary, state, participations, snapshots, config)
    # A dataset of the same name may be here that differs from the data of sites, or that has changed since.
    if _simulated(folder) and setup.has_rows_of(folder.read_config()):
        view.measured = _measured(setup, view)
    return folder, setup, view, kept


def named(against: Sequence[str]) -> list[str | Path]:
    """Return the runs for comparison as folders: after this run, "last" would be another one."""
    return [one if one in (FEDAVG, LOCAL_ONLY) else find_run(one) for one in against]


def _same_data(folder: RunFolder, setup: Setup) -> bool:
    """Return whether a simulation's data are here unchanged: another dataset of the same name may be here."""
    if setup.manifest is None or not _simulated(folder):
        return False
    return bool(folder.read_config().get("data") == setup.digests["data"])


def _simulated(folder: RunFolder) -> bool:
    nodes = folder.read_nodes() if (folder.path / "nodes.json").exists() else []
    return all(hosting.simulated for _, hosting in nodes)


def _baseline(setup: Setup) -> View:
    """Return a run of FedAvg from the same config."""
    none = {"observers": "", "track": "", "resume": ""}
    config = setup.config.entries() | {"strategy": FEDAVG, "hypotheses": 1} | none
    run = play(config)
    summary = Summary.of(run.setup)
    view = View(FEDAVG, summary, run.state, run.fleet.participations, Snapshots(run.state), config)
    view.measured = _measured(run.setup, view)
    return view


def _needs_data(folder: RunFolder, setup: Setup, what: str) -> None:
    """Raise `ConfigError` unless the rows of all clients are here as they were at the start of a run."""
    text = f"{what} needs the clients' rows, and each site has its own; give a run of it instead"
    if setup.manifest is not None and setup.has_rows_of(folder.read_config()):
        return
    if setup.manifest is not None:
        text = f"{what} needs the run's rows, and its dataset has changed since; give a run of it instead"
    raise ConfigError(text, code="config.no-data-here")


def _alike(one: RunFolder, other: RunFolder) -> bool:
    """Return whether two runs had the same rows, as far as their folders tell."""
    return len({str(folder.read_config().get("data", "")) for folder in (one, other)} - {""}) < 2


def _measured(setup: Setup, view: View) -> Measured | None:
    """Measure a run on the rows of validation clients; None if they are not on this machine."""
    dataset = setup.open_dataset()
    model, last = setup.model, view.state.hypotheses
    if dataset is None or not dataset.manifest.split["validation"]:
        return None
    held_out = _held_out(measure(model, dataset, last, setup.config)["held_out"])
    if view.k == 1 or model.local_shapes:
        return Measured(held_out)
    learner = learner_for(model)
    losses, _ = learner.score(last, validation_cohort(dataset, learner))
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
            help="Another run of the same data; fedavg or local-only to make that baseline here. May be repeated.",
            show_default=False,
        ),
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="Measure the run's worth, if that was not done.")
    ] = True,
) -> None:
    """Write the report.html of a run, with other runs beside it. Interrupted runs and runs of a sweep have none yet."""
    with errors_in_one_line(), reading(run):
        typer.echo(write_report(run, against or (), baselines))


app = command_line(main)
