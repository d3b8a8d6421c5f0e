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
from umbel.privacy.gate.entry import Decision
from umbel.privacy.gate.journal import Journal, lines_of
from umbel.privacy.gate.policy import Policy
from umbel.privacy.gate.policy_file import read_policy
from umbel.privacy.gate.runs import SHOWN, Request, Runs, Status
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.totals import Line
from umbel.protocol.cli import command_line, console, csv_cell, fail, printable
from umbel.protocol.errors import ConfigError, LedgerError
from umbel.protocol.home import umbel_home, write_atomically
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
from umbel.protocol.words import count_of

LedgerPath = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH", envvar="UMBEL_LEDGER_PATH", help="The journal; by default $UMBEL_HOME/ledger.jsonl."
    ),
]
Kept = StrEnum("Kept", ["charges", "clients", "evaluations", "sent", "ended", "requests", "signed"])
"""Kinds of lines that can be exported."""


@command_line
def journal(
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
        typer.Option("--csv", help="Print as CSV the charges, or the journal's lines of another kind, oldest first."),
    ] = None,
    create: Annotated[
        bool,
        typer.Option(
            "--create",
            help="Make a new, empty journal: if the policy sets a limit, the node does not make one by itself.",
        ),
    ] = False,
) -> None:
    """Check that a site's journal is intact, and print what each client has spent."""
    path = _path(path)
    if sum(map(bool, (as_json, html, table, create))) > 1:
        text = "choose one of --json, --html, --csv and --create"
        raise ConfigError(text, code="config.both-ways")
    if create:
        if path.exists():
            raise LedgerError(f"{path} exists already", code="ledger.exists")
        Journal.create(path)
    books = Books(path, Site.of(entries_of(node_config)) if node_config else None, delta, to_date=to_date)
    if html:
        write_atomically(html, render(books).encode(), private=True)
    if table:
        _export(books.opened, table)
    elif html or as_json:
        typer.echo(html or json.dumps(books.as_json(), indent=1, default=str))
    else:
        _show(books)


def _show(books: Books) -> None:
    """Print what each client has spent, by the guarantee and, separately, by the paper's heuristic."""
    at_delta = f"epsilon at delta {books.delta:g}"
    columns = {
        "number": "client", "releases": "participations", "epsilon": "epsilon", "epsilon_at_delta": at_delta,
        "epsilon_to_date": "epsilon to date", "row_epsilon_at_delta": f"a row's {at_delta}",
        "row_epsilon_to_date": "a row's epsilon to date", "paper": "paper's budget",
    }  # fmt: skip
    clients = sorted(books.clients, key=lambda one: one.number)
    charges, head = sum(one.releases for one in books.clients), books.opened.head
    typer.echo(f"{books.ledger} is an intact journal of {count_of(head.number, 'line')}; its last hash is {head.hash}")
    typer.echo(f"It records {count_of(charges, 'charge')}, in {count_of(len(books.lines), 'message')}")
    terminal, notes = console(), []
    if clients:
        shown = [name for name in columns if getattr(clients[0], name) != ""]
        table = Table(*map(columns.__getitem__, shown), title=Text(printable(str(books.ledger))))
        for one in clients:
            table.add_row(*(str(getattr(one, name)) for name in shown))
        terminal.print(table)
        notes.append(
            "epsilon: the guarantee between any two data sets of a client, over all its releases, for tasks fixed in "
            "advance. Gaussian noise has an epsilon only at a delta. A client has no guarantee after a release without "
            "a public clip norm, or with an open choice. paper's budget: the sum of n/nu, a heuristic that guarantees "
            "nothing."
        )
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
    if messages := sum(line["kind"] == "evaluations" for line in books.opened.lines()):
        notes.append(
            f"Servers asked for reports in {count_of(messages, 'message')}. The journal does not count exact losses of "
            "validation clients (exact reports, or no budget)."
        )
    for note in notes:
        terminal.print(note, soft_wrap=True)


def _export(journal: Journal, kind: Kept) -> None:
    writer = None
    for row in journal.rows() if kind is Kept.charges else _rows(journal, kind):
        if writer is None:
            writer = csv.DictWriter(sys.stdout, list(row))
            writer.writeheader()
        # A run's name, and what a request asks, are its server's.
        plain = {name: printable(value) if isinstance(value, str) else value for name, value in row.items()}
        writer.writerow({name: csv_cell(value) for name, value in plain.items()})


def _rows(journal: Journal, kind: Kept) -> Iterator[dict[str, Any]]:
    """Yield the lines of a kind, without their place in the chain; clients and what was sent one by one."""
    number = 0
    for line in journal.lines():
        if kind is Kept.clients and line["kind"] == kind:
            for name in line["names"]:
                yield {"number": number, "at": line["at"], "name": json.dumps(name)}
                number += 1
        elif kind is Kept.sent:
            for node, run, name, digest in line.get("sent", ()):
                yield {"at": line["at"], "node": node, "run": run, "name": name, "digest": digest}
        elif line["kind"] == kind:
            yield {"at": line["at"], **_plain(line)}


def _plain(line: Line) -> dict[str, Any]:
    own = {key: value for key, value in line.items() if key not in ("number", "kind", "at", "previous", "hash")}
    return dict(own.get("request", own))


@command_line
def backup(
    path: Annotated[Path, typer.Argument(metavar="PATH", envvar="UMBEL_LEDGER_PATH", help="The journal.")],
    copy: Annotated[Path, typer.Argument(metavar="COPY", help="A new file.")],
) -> None:
    """Copy the journal, also while the site runs, and check the copy."""
    lines = Journal(path).copy_to(copy)
    typer.echo(f"{copy} is a copy of {path}, with {count_of(lines, 'line')}")


_Ledger = Annotated[
    Path | None,
    typer.Option("--ledger", envvar="UMBEL_LEDGER_PATH", help="The site's journal; by default that of $UMBEL_HOME."),
]
_By = Annotated[
    str | None, typer.Option("--by", help="The person that decides.", show_default="the user of this machine")
]
_Reason = Annotated[str, typer.Option("--reason", help="Why, for the record.")]
_Digest = Annotated[str, typer.Argument(metavar="REQUEST", help="The request's name, as in the list.")]


@command_line
def requests(
    ledger: _Ledger = None,
    decided: Annotated[bool, typer.Option("--all", help="Also print approved and refused requests.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Print every entry of the run config.")] = False,
) -> None:
    """List the requests that wait for approval at a site with approve = "ask", oldest first."""
    found = [one for one in Runs(_path(ledger)).requests() if decided or one.status is Status.WAITING]
    terminal = console()
    for request in found:
        terminal.print(_table(request, whole))
    if not found:
        typer.echo("no request waits" if not decided else "there are no requests")


@command_line
def approve(digest: _Digest, ledger: _Ledger = None, by: _By = None, reason: _Reason = "") -> None:
    """Approve exactly this request for all runs, now and later, within the site's limits."""
    _decide(digest, Status.APPROVED, ledger, by, reason)


@command_line
def refuse(digest: _Digest, ledger: _Ledger = None, by: _By = None, reason: _Reason = "") -> None:
    """Refuse this request for all runs, even if it was approved before."""
    _decide(digest, Status.REFUSED, ledger, by, reason)


def _decide(digest: str, status: Status, ledger: Path | None, by: str | None, reason: str) -> None:
    request = Runs(_path(ledger)).decide(digest, status, by or getpass.getuser(), reason)
    typer.echo(f"{request.digest[:SHOWN]} is {request.status}")


def _path(ledger: Path | None) -> Path:
    return ledger or umbel_home() / "ledger.jsonl"


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


_DEFAULTS = {
    name: {entry.name: entry.default for entry in fields(kind)}
    for name, kind in (("training", TrainingSpec), ("evaluation", EvaluationSpec))
}
"""Of the entries of a message's parts."""


@command_line
def log(
    path: LedgerPath = None,
    since: Annotated[datetime | None, typer.Option(help="Only messages from this time on (UTC).")] = None,
    refused: Annotated[bool, typer.Option(help="Only messages that were refused completely or in part.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Also print what has its default value.")] = False,
) -> None:
    """Print a row for each message: its time, its request, the site's decision and the reason."""
    path = _path(path)
    table = Table("", "time (UTC)", "run", "message", "asked", "decision", "paid", "reason", title=Text(str(path)))
    fault = None
    try:
        for line, _ in lines_of(path):
            late = since is not None and datetime.fromisoformat(line["at"]) < since.replace(tzinfo=UTC)
            if line["kind"] != "message" or late or (refused and line["decision"] == Decision.ANSWERED):
                continue
            table.add_row(*_cells(line, full))
    except LedgerError as error:
        fault = str(error)
    if fault is None or table.row_count:
        console().print(table)
    if fault is not None:
        fail(fault)


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


@command_line
def policy(file: Annotated[Path, typer.Argument(metavar="POLICY", help="The policy file.")]) -> None:
    """Check a policy file; print what it allows, what it promises, and whom it does not cover."""
    policy = Policy.parse(read_policy(file.absolute()), str(file))
    # Where the file names no data, the node's configuration does.
    Site.serving(policy.model_copy(update={"data_path": policy.data_path or "/"}))
    table = Table("", "", title=Text(printable(str(file))), show_header=False, show_lines=True)
    for what, text in [("digest", policy.digest), *explained(policy)]:
        table.add_row(what, Text(printable(text)))
    console().print(table)
