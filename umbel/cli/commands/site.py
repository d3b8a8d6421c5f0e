"""A site's books, requests, messages and policy, as ``umbel site`` shows them and decides."""

from __future__ import annotations

import csv
import getpass
import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from umbel.client.checks import entries_of
from umbel.console.books import Books, plan, prices
from umbel.console.page import explained, render
from umbel.privacy.accounting.guarantee import DELTA
from umbel.privacy.gate.consent import decide
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.policy import Policy
from umbel.privacy.gate.policy_file import read_policy
from umbel.privacy.gate.runs import SHOWN, Request, Runs, Status
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.site_log import Decision, Line, SiteLog
from umbel.privacy.gate.store import beside
from umbel.protocol.cli import command_line, console, csv_cell, errors_in_one_line, fail, printable
from umbel.protocol.errors import ConfigError, LedgerError, LogError
from umbel.protocol.home import umbel_home, write_atomically
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
from umbel.protocol.words import count_of

LedgerPath = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH", envvar="UMBEL_LEDGER_PATH", help="The ledger; by default $UMBEL_HOME/ledger.sqlite."
    ),
]
Kept = StrEnum("Kept", ["charges", "clients", "evaluations", "sent", "ended", "requests", "signed"])
"""Tables that can be exported."""


def _journal(
    path: LedgerPath = None,
    delta: Annotated[float, typer.Option(min=0, max=0.999, help="Delta of the (epsilon, delta) guarantee.")] = DELTA,
    to_date: Annotated[
        bool, typer.Option("--to-date", help="Add the epsilon to date, for releases that were not planned in advance.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print as JSON what each client spent, each run's messages and charges, and requests with prices.",
        ),
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the same into this file, as one page that needs no other file.")
    ] = None,
    node_config: Annotated[
        str,
        typer.Option(
            help="With --json or --html: the node's configuration, to show how much of its budget a client used."
        ),
    ] = "",
    table: Annotated[
        Kept | None,
        typer.Option("--csv", help="Print as CSV the charges, or another of the ledger's tables, oldest first."),
    ] = None,
    create: Annotated[
        bool,
        typer.Option(
            "--create",
            help="Make a new, empty ledger: if the policy sets a limit, the node does not make one by itself.",
        ),
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Charge again what the log records and an older copy of the ledger lacks. Until then, a site with an "
            "older ledger refuses everything. If the ledger is lost, first restore a backup, or create an empty one.",
        ),
    ] = False,
) -> None:
    """Check that a site's ledger and log are intact and agree, and print what each client has spent."""
    path = _path(path)
    with errors_in_one_line():
        if sum(map(bool, (as_json, html, table, create, repair))) > 1:
            text = "choose one of --json, --html, --csv, --create and --repair"
            raise ConfigError(text, code="config.both-ways")
        if create:
            if path.exists():
                raise LedgerError(f"{path} exists already", code="ledger.exists")
            Ledger.create(path)
        books = Books(path, Site.of(entries_of(node_config)) if node_config else None, delta, to_date=to_date)
        opened = books.opened
        if repair:
            SiteLog(beside(path)).restored()
        if html:
            write_atomically(html, render(books).encode(), private=True)
        if table:
            _export(opened, table)
        elif html or as_json:
            typer.echo(html or json.dumps(books.as_json(), indent=1, default=str))
        else:
            _show(books)


def _checked(books: Books) -> Iterator[str]:
    """Yield lines that say that the ledger and its log are intact, or raise the error."""
    lines, log = books.lines, beside(books.ledger)
    charges, paid = sum(one.releases for one in books.clients), sum(line["paid"] for line in lines)
    if charges < paid:
        text = f"{log} has {paid} charges, but {books.ledger} only {charges}: the ledger may be an older copy"
        raise LogError(f"{text}; umbel site journal --repair charges them", code="log.ledger-behind")
    yield f"{books.ledger} is an intact ledger with {count_of(charges, 'charge')}"
    if lines:
        yield f"{log} is an intact log of {count_of(len(lines), 'line')}; its last hash is {lines[-1]['hash']}"
        yield f"It records {paid:,} of the ledger's {count_of(charges, 'charge')}"


def _show(books: Books) -> None:
    """Print what each client has spent, by the guarantee and, separately, by the paper's heuristic."""
    at_delta = f"epsilon at delta {books.delta:g}"
    columns = {
        "number": "client", "releases": "participations", "epsilon": "epsilon", "epsilon_at_delta": at_delta,
        "epsilon_to_date": "epsilon to date", "row_epsilon_at_delta": f"a row's {at_delta}",
        "row_epsilon_to_date": "a row's epsilon to date", "paper": "paper's budget",
    }  # fmt: skip
    clients = sorted(books.clients, key=lambda one: one.number)
    shown = [name for name in columns if not clients or getattr(clients[0], name) != ""]
    table = Table(*map(columns.__getitem__, shown), title=Text(printable(str(books.ledger))))
    for one in clients:
        table.add_row(*(str(getattr(one, name)) for name in shown))
    for line in _checked(books):
        typer.echo(line)
    terminal = console()
    terminal.print(table)
    notes = [
        "epsilon: the guarantee between any two data sets of a client, over all its releases, for tasks fixed in "
        "advance. Gaussian noise has an epsilon only at a delta. A client has no guarantee after a release without a "
        "public clip norm, or with an open choice. "
        "paper's budget: the sum of n/nu, a heuristic that guarantees nothing.",
    ]
    if books.hides_rows:
        notes.append(
            "a row's epsilon: the guarantee between two data sets of a client that differ by one row, added or "
            "removed. It hides each single row, and not what the client's rows have in common."
        )
    if books.to_date:
        notes.append(
            f"to date: an epsilon at delta {books.delta:g} that holds at all times at once, even if servers choose "
            "each release after they have seen the earlier ones. The other figures hold for tasks fixed in advance."
        )
    if messages := sum(row["messages"] for row in books.opened.table("evaluations")):
        notes.append(
            f"Servers asked for reports in {count_of(messages, 'message')}. This ledger does not count exact losses of "
            "validation clients (exact-losses, or no budget)."
        )
    for note in notes:
        terminal.print(note, soft_wrap=True)


def _export(ledger: Ledger, table: Kept) -> None:
    writer = None
    for row in ledger.rows() if table is Kept.charges else ledger.table(table):
        if writer is None:
            writer = csv.DictWriter(sys.stdout, list(row))
            writer.writeheader()
        # A run's name, and what a request asks, are its server's.
        plain = {name: printable(value) if isinstance(value, str) else value for name, value in row.items()}
        writer.writerow({name: csv_cell(value) for name, value in plain.items()})


def _backup(
    path: Annotated[Path, typer.Argument(metavar="PATH", envvar="UMBEL_LEDGER_PATH", help="The ledger.")],
    copy: Annotated[Path, typer.Argument(metavar="COPY", help="A new file; the copy of the log lies beside it.")],
) -> None:
    """Copy the ledger and its log, also while the site runs, and check the copies."""
    with errors_in_one_line():
        if copy.exists():
            raise LedgerError(f"{copy} exists already; name another file", code="ledger.exists")
        ledger, log, lines = Books(path).opened, SiteLog(beside(path)), 0
        # The log first: then the copied ledger has all charges that the copied log records.
        if log.path.exists():
            lines = log.copy_to(beside(copy))
        ledger.copy_to(copy)
        charges = sum(one.releases for one in Books(copy).clients)
    typer.echo(f"{copy} is a copy of {path}, with {count_of(charges, 'charge')}; its log has {count_of(lines, 'line')}")


journal, backup = command_line(_journal), command_line(_backup)


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
        found = [one for one in Runs(_path(ledger)).requests() if decided or one.status is Status.WAITING]
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
    path = _path(path)
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


log = command_line(_log)


def _policy(file: Annotated[Path, typer.Argument(metavar="POLICY", help="The policy file.")]) -> None:
    """Check a policy file; print what it allows, what it promises, and whom it does not cover."""
    with errors_in_one_line():
        policy = Policy.parse(read_policy(file.absolute()), str(file))
        # Where the file names no data, the node's configuration does.
        Site.serving(policy.model_copy(update={"data_path": policy.data_path or "/"}))
    table = Table("", "", title=Text(printable(str(file))), show_header=False, show_lines=True)
    for what, text in [("digest", policy.digest), *explained(policy)]:
        table.add_row(what, Text(printable(text)))
    console().print(table)


policy = command_line(_policy)
