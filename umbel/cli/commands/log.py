"""``umbel log``: the requests of servers to a site, and the site's decisions."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from umbel.cli.commands.ledger import charges_in, opened
from umbel.privacy.gate.site_log import Decision, Line, SiteLog
from umbel.privacy.gate.store import LOG_SUFFIX, beside
from umbel.protocol.cli import command_group, console, errors_in_one_line, fail, printable
from umbel.protocol.errors import LogError
from umbel.protocol.home import umbel_home
from umbel.protocol.words import count_of

app = command_group("Read a site's log: servers' requests, and the site's decisions.")

_LogPath = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH", envvar="UMBEL_LEDGER_PATH", help="The log, or its ledger; by default $UMBEL_HOME/ledger.sqlite."
    ),
]


@app.command("show")
def show_log(
    path: _LogPath = None,
    since: Annotated[datetime | None, typer.Option(help="Only messages from this time on (UTC).")] = None,
    refused: Annotated[bool, typer.Option(help="Only messages that were refused completely or in part.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each line as JSON.")] = False,
) -> None:
    """Print a row for each message: its time, its request, the site's decision and the reason."""
    log = SiteLog(_log_path(path))
    table = Table("", "time (UTC)", "run", "message", "asked", "decision", "paid", "reason", title=Text(str(log.path)))
    fault = None
    try:
        for line in log.lines():
            late = since is not None and datetime.fromisoformat(line["at"]) < since.replace(tzinfo=UTC)
            if late or (refused and line["decision"] == Decision.ANSWERED):
                continue
            if as_json:
                typer.echo(json.dumps(line))
            else:
                table.add_row(*_cells(line))
    except LogError as error:
        fault = str(error)
    if not as_json and (fault is None or table.row_count):
        console().print(table)
    if fault is not None:
        fail(fault)


@app.command("check")
def check_log(path: _LogPath = None) -> None:
    """Check that the log is intact and agrees with the ledger; exit with an error if not."""
    log = SiteLog(_log_path(path))
    ledger = log.path.with_name(log.path.name.removesuffix(LOG_SUFFIX))
    with errors_in_one_line():
        lines = paid = 0
        last = "none"
        for line in log.lines():
            lines, last, paid = line["number"], line["hash"], paid + line["paid"]
        charges = charges_in(opened(ledger)) if ledger.exists() else 0
        if charges < paid:
            text = f"{log.path} has {paid} charges, but {ledger} only {charges}: the ledger may be an older copy"
            raise LogError(text, code="log.ledger-behind")
    typer.echo(f"{log.path} is an intact log of {count_of(lines, 'line')}; its last hash is {last}")
    typer.echo(f"It records {paid:,} of the ledger's {count_of(charges, 'charge')}")


@app.command("set-aside")
def set_log_aside(path: _LogPath = None) -> None:
    """Rename a damaged or long log, and begin a new one. Until then, a site with a damaged log refuses everything."""
    with errors_in_one_line():
        log = SiteLog(_log_path(path))
        typer.echo(f"{log.path} is a new log; the previous one is {log.set_aside()}")


def _log_path(path: Path | None) -> Path:
    path = path or umbel_home() / "ledger.sqlite"
    return path if path.suffix == ".jsonl" else beside(path)


def _part(name: str, values: Any) -> str:
    """Return a part of a message in words: its entries, or the number of parts that umbel does not know."""
    if not isinstance(values, dict):
        return f"{name}: {values}"
    told = (f"{key.replace('_', '-')} {value}" for key, value in values.items() if value != "")
    return f"{name}: {', '.join(told)}"


def _cells(line: Line) -> list[Text]:
    """Return the cells of a line."""
    asked = "; ".join(_part(name, values) for name, values in line["asked"].items())
    cells = (line["number"], line["at"], line["run"], line["message"], asked, line["decision"], line["paid"])
    texts = [*map(str, cells), line["reason"]]
    return [Text(printable(text)) for text in texts]
