"""``umbel runs``: list, show, compare, export and remove runs; and ``umbel server status``, of one at real sites."""

from __future__ import annotations

import math
import shutil
import time
from contextlib import ExitStack
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from umbel.data import find_dataset, read_manifest
from umbel.protocol.cli import command_line, console, printable
from umbel.protocol.errors import ConfigError, UmbelError
from umbel.protocol.presence import Presence
from umbel.protocol.run_config import RunConfig
from umbel.protocol.words import at_time, count_of, in_time
from umbel.server.run_folder import RunFolder
from umbel.server.runs import LAST, all_runs, find_run, home_of_runs, reading
from umbel.server.status import SiteStatus, Status

RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run: its name, its path, or last.")]
_COLUMNS = ("rounds", "last loss", "best loss", "ended")


@command_line
def list_runs() -> None:
    """Print all runs under $UMBEL_HOME/runs, oldest first."""
    found = all_runs()
    if not found:
        typer.echo(f"there are no runs in {home_of_runs()}")
        return
    table = Table(Column("run", no_wrap=True, min_width=max(len(path.name) for path in found)), *_COLUMNS)
    for path in found:
        try:
            with reading(path):
                rounds, ended = _outcome(path)
                last, best = _losses(path)
        except UmbelError as error:
            rounds, last, best, ended = 0, "", "", error.text
        table.add_row(Text(printable(path.name)), str(rounds), Text(last), Text(best), Text(printable(ended)))
    console().print(table)


@command_line
def show(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="A run: its name, its path, or last. Several are compared.")
    ],
) -> None:
    """Print a run's settings, its results, and its cost in privacy; of several, those settings that differ."""
    with reading(runs[0] if len(runs) == 1 else "one of the runs"):
        paths = list(dict.fromkeys(map(find_run, runs)))
        console().print(_table_of(paths))


def _table_of(paths: list[Path]) -> Table:
    """Return a column for each run; of a single one, the settings are those that are no defaults."""
    alone = len(paths) == 1
    whole = alone or len({path.name for path in paths}) < len(paths)
    table = Table("", *(Column(Text(printable(str(path) if whole else path.name))) for path in paths))

    def row(name: str, *cells: str) -> None:
        if any(cells):
            table.add_row(name, *map(Text, cells))

    folders, outcomes = [RunFolder(path) for path in paths], list(map(_outcome, paths))
    row("rounds", *(f"{rounds}; {printable(ended)}" for rounds, ended in outcomes))
    if any(rounds for rounds, _ in outcomes):
        from umbel.server.result import Result

        loaded = [Result(path) if rounds else None for path, (rounds, _) in zip(paths, outcomes, strict=True)]
        row("last loss", *(_loss(one.last_loss, one.unit) if one else "" for one in loaded))
        row("best loss", *(_loss(one.loss, one.unit) if one else "" for one in loaded))
        row("worth it?", *(worth.verdict if (worth := one.read_worth()) else "" for one in folders))
        row("privacy", *("\n".join(one.privacy) if one else "" for one in loaded))
    digests = [str(one.read_config().get("data", "")) for one in folders]
    if len(set(digests)) > 1:
        row("digest of the data", *digests)
    configs, defaults = [one.read_run_config() for one in folders], RunConfig().entries()
    for key in RunConfig.names():
        values = [one.get(key, defaults[key]) for one in configs]
        if any(value != (defaults[key] if alone else values[0]) for value in values):
            row(key, *map(str, values))
    return table


@command_line
def rm(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names or paths.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete the folders of runs permanently."""
    with ExitStack() as held:
        paths = list(dict.fromkeys(map(find_run, runs)))
        for path in paths:
            # A run is a folder of files, and of what followed it. A folder with others holds more, which umbel must not
            # delete.
            own = (one for one in path.iterdir() if one.name != "tensorboard" or one.is_symlink())
            if more := next((one for one in own if one.is_symlink() or not one.is_file()), None):
                text = f"{path} holds {more.name!r}, which is not part of a run; delete it by hand"
                raise ConfigError(text, code="config.not-a-run-alone")
            held.enter_context(RunFolder(path).held())  # so that it neither runs nor resumes
        for path in paths:
            if yes or typer.confirm(f"Delete {path}?"):
                shutil.rmtree(path)
                typer.echo(f"{path} is deleted")


def _loss(value: float, unit: str) -> str:
    """Return a loss in the target's unit; NaN stands for none."""
    return "none was reported" if math.isnan(value) else f"{value:.6g} {unit}".rstrip()


def _losses(path: Path) -> tuple[str, str]:
    """Return the last and the best loss, in the target's unit as `show` has them, if the run's model is here."""
    entries = RunFolder(path).read_history()
    last = next((entry.loss for entry in reversed(entries) if entry.loss is not None), None)
    loss = entries[entries[-1].best_round].loss if entries else None
    try:
        factor, unit = _scale(path) if last is not None else (0.0, "")
    except UmbelError:
        factor, unit = 0.0, "as stored"
    of_last, of_best = ("" if one is None else f"{one * (factor or 1.0):.6g} {unit}".rstrip() for one in (last, loss))
    return of_last, of_best


def _scale(path: Path) -> tuple[float, str]:
    """Return `scale_of` a run, without a look at its data."""
    folder = RunFolder(path)
    run, manifest = RunConfig.parse(folder.read_run_config()), folder.read_manifest()
    if manifest is None and run.dataset:
        manifest = read_manifest(find_dataset(run.dataset))
    if manifest is None or "scale" not in manifest.target:
        return 0.0, ""
    from umbel.models import load_for  # it imports PyTorch
    from umbel.server.summary import scale_of

    return scale_of(load_for(run, manifest), manifest)


def _outcome(path: Path) -> tuple[int, str]:
    """Return the number of trained rounds, and why the run ended."""
    entries = RunFolder(path).read_history()
    stopped = RunFolder(path).read_outcome()
    if not stopped:
        when = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        stopped = f"it is running, or was interrupted; last written {when}"
    return sum(1 for entry in entries if entry.asked), stopped


@command_line
def report(
    run: RunName = LAST,
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="Measure the run's worth, if that was not done.")
    ] = True,
) -> None:
    """Write the report.html of a run. Interrupted runs and runs of a sweep have none yet."""
    from umbel.simulation.worth import write_report  # it imports PyTorch

    with reading(run):
        typer.echo(write_report(run, baselines))


Format = StrEnum("Format", {"SAFETENSORS": "safetensors", "ONNX": "onnx"})
"""File format of a hypothesis; see `umbel.cli.runs.export`."""


@command_line
def export(
    run: RunName,
    folder: Annotated[Path, typer.Argument(help="Folder to write to.")],
    format: Annotated[
        Format,
        typer.Option(
            help="File format. onnx is for data from a table: it takes raw columns and predicts in the target's unit."
        ),
    ] = Format.SAFETENSORS,
    client: Annotated[
        str,
        typer.Option(
            help="A client of the run's dataset, by its name or number: write its predictor as onnx, to client-N. No "
            "guarantee covers that file."
        ),
    ] = "",
    personalise: Annotated[
        str,
        typer.Option(help="How the client personalises the hypotheses.", show_default="as umbel predict"),
    ] = "",
) -> None:
    """Write a run's best hypotheses, one file each: hypothesis-0, hypothesis-1, ..."""
    with reading(run):
        if personalise and not client:
            raise ConfigError("--personalise needs --client; name one", code="config.no-client")
        path = find_run(run)
        # The import loads PyTorch; a missing run is reported before.
        from umbel.cli import runs as python

        how = {"personalise": personalise} if personalise else {}
        for file in python.export(
            python.Run(path), folder.expanduser().absolute(), format.value, client=client or None, **how
        ):
            typer.echo(file)


def _state(site: SiteStatus) -> Text:
    since = f" since {at_time(site.since)}" if site.since else ""
    return Text(f"{site.presence}{since}", style="" if site.presence is Presence.ONLINE else "bold")


@command_line
def status(run: RunName = LAST) -> None:
    """Print a run's round, the time left, and its sites: who is there, what they released, and why they refused."""
    with reading(run):
        folder = RunFolder(find_run(run))
        status = folder.read_status()
        table = Table("", "", title=Text(printable(folder.path.name)), show_header=False)
        for name, value in _lines(folder, status):
            table.add_row(name, Text(value))
        console().print(table, _sites(status))


def _sites(status: Status) -> Table:
    table = Table("site", "state", "last reply", "training", "validation", "releases", "refusals")
    for site in status.sites:
        counts = (str(one) for one in (site.training, site.validation, site.releases))
        seen = at_time(site.seen) if site.seen else ""
        refused = (f"{times} x {printable(code) or 'no reason told'}" for code, times in site.refusals.items())
        table.add_row(Text(printable(site.name)), _state(site), seen, *counts, Text(", ".join(refused)))
    return table


def _lines(folder: RunFolder, status: Status) -> list[tuple[str, str]]:
    there = sum(site.presence is Presence.ONLINE for site in status.sites)
    history = folder.read_history()
    ended = folder.read_outcome()
    lines = [
        ("rounds", f"{status.round - 1} of {status.rounds} done"),
        ("sites", f"{there} of {len(status.sites)} can be asked; a round needs {count_of(status.pause_below, 'site')}"),
        ("as of", at_time(status.written)),
    ]
    if ended:
        return [*lines, ("ended", printable(ended))]
    if status.paused:
        waits = f"since {at_time(status.paused)}, at most until {at_time(status.ends)}"
        return [*lines, ("paused", waits)]
    if trained := [one.seconds for one in history if one.asked]:
        left = (status.rounds - len(trained)) * sum(trained) / len(trained)
        lines.append(("time left", f"about {in_time(max(0.0, left - (time.time() - status.written)))}"))
    return lines
