"""``umbel site log``: the requests of servers to a site, and the site's decisions."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from umbel.privacy.gate.site_log import Decision, Line, SiteLog
from umbel.privacy.gate.store import beside
from umbel.protocol.cli import command_line, console, errors_in_one_line, fail, printable
from umbel.protocol.errors import LogError
from umbel.protocol.home import umbel_home
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

_DEFAULTS = {
    name: {entry.name: entry.default for entry in fields(kind)}
    for name, kind in (("training", TrainingSpec), ("evaluation", EvaluationSpec))
}
"""Of the entries of a message's parts."""


def _log(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            envvar="UMBEL_LEDGER_PATH",
            help="The log, or its ledger; by default $UMBEL_HOME/ledger.sqlite.",
        ),
    ] = None,
    since: Annotated[datetime | None, typer.Option(help="Only messages from this time on (UTC).")] = None,
    refused: Annotated[bool, typer.Option(help="Only messages that were refused completely or in part.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Also print what has its default value.")] = False,
    set_aside: Annotated[
        bool,
        typer.Option(
            "--set-aside",
            help="Rename a damaged or long log, and begin a new one. Until then, a site with a damaged log refuses "
            "everything.",
        ),
    ] = False,
) -> None:
    """Print a row for each message: its time, its request, the site's decision and the reason."""
    if set_aside:
        with errors_in_one_line():
            log = SiteLog(_log_path(path))
            typer.echo(f"{log.path} is a new log; the previous one is {log.set_aside()}")
        return
    log = SiteLog(_log_path(path))
    table = Table("", "time (UTC)", "run", "message", "asked", "decision", "paid", "reason", title=Text(str(log.path)))
    fault = None
    try:
        for line in log.lines():
            late = since is not None and datetime.fromisoformat(line["at"]) < since.replace(tzinfo=UTC)
            if late or (refused and line["decision"] == Decision.ANSWERED):
                continue
            table.add_row(*_cells(line, full))
    except LogError as error:
        fault = str(error)
    if fault is None or table.row_count:
        console().print(table)
    if fault is not None:
        fail(fault)


def _log_path(path: Path | None) -> Path:
    path = path or umbel_home() / "ledger.sqlite"
    return path if path.suffix == ".jsonl" else beside(path)


def _part(name: str, values: Any, full: bool) -> str:
    """Return a part of a message in words: its entries, or the number of parts that umbel does not know."""
    if not isinstance(values, dict):
        return f"{name}: {values}"
    usual = {} if full else _DEFAULTS.get(name, {})
    told = (
        f"{key.replace('_', '-')} {value}"
        for key, value in values.items()
        if value != "" and (key not in usual or value != usual[key])
    )
    return f"{name}: {', '.join(told)}"


def _cells(line: Line, full: bool) -> list[Text]:
    """Return the cells of a line."""
    asked = "; ".join(_part(name, values, full) for name, values in line["asked"].items())
    cells = (line["number"], line["at"], line["run"], line["message"], asked, line["decision"], line["paid"])
    texts = [*map(str, cells), line["reason"]]
    return [Text(printable(text)) for text in texts]


app = command_line(_log)
