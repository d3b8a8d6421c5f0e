"""``umbel site requests``, ``approve`` and ``refuse``: requests that wait for a site's approval."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from umbel.console.books import plan, prices
from umbel.privacy.gate.consent import decide
from umbel.privacy.gate.runs import SHOWN, Request, Runs, Status
from umbel.protocol.cli import command_line, console, errors_in_one_line, printable
from umbel.protocol.home import umbel_home

_Ledger = Annotated[
    Path | None,
    typer.Option("--ledger", envvar="UMBEL_LEDGER_PATH", help="The site's ledger; by default that of $UMBEL_HOME."),
]
_By = Annotated[
    str | None, typer.Option("--by", help="The person that decides.", show_default="the user of this machine")
]
_Reason = Annotated[str, typer.Option("--reason", help="Why, for the record.")]
_Digest = Annotated[str, typer.Argument(metavar="REQUEST", help="The request's name, as in the list.")]


def _requests(
    ledger: _Ledger = None,
    decided: Annotated[bool, typer.Option("--all", help="Also print approved and refused requests.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Print every entry of the run config.")] = False,
) -> None:
    """List the requests that wait for approval at a site with approve = "ask", oldest first."""
    with errors_in_one_line():
        found = [one for one in _runs(ledger).requests() if decided or one.status is Status.WAITING]
        terminal = console()
        for request in found:
            terminal.print(_table(request, whole))
        if not found:
            typer.echo("no request waits" if not decided else "there are no requests")


def _approve(digest: _Digest, ledger: _Ledger = None, by: _By = None, reason: _Reason = "") -> None:
    """Approve exactly this request for all runs, now and later, within the site's limits."""
    _decide(digest, Status.APPROVED, ledger, by, reason)


def _refuse(digest: _Digest, ledger: _Ledger = None, by: _By = None, reason: _Reason = "") -> None:
    """Refuse this request for all runs, even if it was approved before."""
    _decide(digest, Status.REFUSED, ledger, by, reason)


def _decide(digest: str, status: Status, ledger: Path | None, by: str | None, reason: str) -> None:
    with errors_in_one_line():
        request = decide(_path(ledger), digest, status, by or getpass.getuser(), reason)
        typer.echo(f"{request.digest[:SHOWN]} is {request.status}")


def _runs(ledger: Path | None) -> Runs:
    return Runs(_path(ledger))


def _path(ledger: Path | None) -> Path:
    return ledger or umbel_home() / "ledger.sqlite"


def _table(request: Request, whole: bool) -> Table:
    """Return a request's task, its price, and its plan."""
    asks = request.asks
    table = Table("", "", title=f"request {request.digest[:SHOWN]}, {request.status}", show_header=False)
    table.add_row("asked", f"{request.at} by run {request.run}")
    table.add_row("researcher", _cell(asks.get("researcher", "not known to this site")))
    if request.decided:
        said = f"{request.decided} by {request.person}" + (f": {request.reason}" if request.reason else "")
        table.add_row(str(request.status), _cell(said))
    table.add_row("policy", request.policy)
    for name, value in prices(request):
        table.add_row(name, _cell(value))
    if "exact-losses" in asks:
        table.add_row("outside the price", "validation clients, which report exact losses")
    for name, value in plan(request, whole):
        table.add_row(name, _cell(value))
    for name, value in asks["differs"].items():
        table.add_row(Text(f"otherwise: {name.replace('_', '-')}", style="red"), _cell(value))
    return table


def _cell(value: Any) -> Text:
    return Text(printable(str(value)))


requests, approve, refuse = command_line(_requests), command_line(_approve), command_line(_refuse)
