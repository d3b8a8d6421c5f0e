"""``umbel runs``: what runs have left behind."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from umbel.protocol.cli import command_group, console, errors_in_one_line, fail, printable
from umbel.protocol.errors import ConfigError
from umbel.protocol.run_config import RunConfig
from umbel.server.run_folder import RunFolder
from umbel.server.runs import all_runs, find_run, home_of_runs

app = command_group("What runs have left behind.")

_COLUMNS = ("rounds", "best loss", "ended")
_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run: its name, its path, or last.")]


@app.command("list")
def list_runs() -> None:
    """Print all runs under $UMBEL_HOME/runs, the oldest first."""
    found = all_runs()
    if not found:
        typer.echo(f"there are no runs in {home_of_runs()}")
        return
    table = Table(Column("run", no_wrap=True, min_width=max(len(path.name) for path in found)), *_COLUMNS)
    for path in found:
        rounds, best, ended = _outcome(path)
        table.add_row(Text(printable(path.name)), str(rounds), best, Text(printable(ended)))
    console().print(table)


@app.command()
def show(run: _Run) -> None:
    """Print what a run was asked, what came of it, and what it cost in privacy."""
    with errors_in_one_line():
        path = find_run(run)
        rounds, _, ended = _outcome(path)
        table = Table("", "", title=Text(printable(path.name)), show_header=False)
        table.add_row("folder", Text(printable(str(path))))
        table.add_row("rounds", Text(f"{rounds}; {printable(ended)}"))
        if rounds:
            from umbel.server.result import Result

            loaded = Result(path)
            table.add_row("best loss", Text(f"{loaded.loss:.6g} {loaded.unit}".rstrip()))
            for line in loaded.privacy:
                table.add_row("privacy", Text(line))
        for key, value in _set(path).items():
            table.add_row(key, Text(str(value)))
        console().print(table)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Two runs or more: names, paths, or last.")],
) -> None:
    """Print runs side by side: their results, and where their configurations differ."""
    with errors_in_one_line():
        paths = [find_run(run) for run in runs]
        if len(paths) < 2:
            fail("name two runs or more")
        from umbel.server.result import Result

        loaded = [Result(path) for path in paths]
        table = Table("", *(Column(Text(printable(path.name))) for path in paths))
        table.add_row("rounds", *(str(_outcome(path)[0]) for path in paths))
        table.add_row("best loss", *(Text(f"{one.loss:.6g} {one.unit}".rstrip()) for one in loaded))
        table.add_row("privacy", *("\n".join(one.privacy) for one in loaded))
        for key in RunConfig.names():
            values = [one.config.get(key) for one in loaded]
            if any(value != values[0] for value in values):
                table.add_row(key, *(Text(str(value)) for value in values))
        console().print(table)


@app.command()
def remove(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names or paths.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Without asking.")] = False,
) -> None:
    """Delete the folders of runs, for good."""
    with errors_in_one_line():
        paths = [find_run(run) for run in runs]
        for path in paths:
            # A run is a folder of files. One with folders in it holds more, which is not umbel's to delete.
            if more := next((one for one in path.iterdir() if one.is_symlink() or not one.is_file()), None):
                text = f"{path} holds {more.name!r} besides a run; delete it by hand"
                raise ConfigError(text, code="config.not-a-run-alone")
        for path in paths:
            if yes or typer.confirm(f"Delete {path}?"):
                shutil.rmtree(path)
                typer.echo(f"{path} is deleted")


def _outcome(path: Path) -> tuple[int, str, str]:
    """Return how many rounds a run trained, the loss of what it keeps as the model counts it, and why it ended."""
    history, outcome = path / "history.jsonl", path / "outcome.json"
    entries = RunFolder(path).read_history() if history.exists() else []
    best = entries[-1].best_round if entries else 0
    loss = next((f"{entry.loss:.6g}" for entry in entries if entry.number == best), "")
    stopped = str(json.loads(outcome.read_text(encoding="utf-8"))["stopped"] or "") if outcome.exists() else ""
    if not stopped:
        when = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        stopped = f"it goes on, or was interrupted; last written {when}"
    return sum(1 for entry in entries if entry.asked), loss, stopped


def _set(path: Path) -> dict[str, Any]:
    """Return what a run was asked otherwise than by default."""
    defaults = RunConfig().entries()
    return {key: value for key, value in RunFolder(path).read_run_config().items() if defaults.get(key) != value}
