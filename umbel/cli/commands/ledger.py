"""``umbel ledger``: the past spending of a site's clients."""

from __future__ import annotations

import csv
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from umbel.client.checks import entries_of
from umbel.console.books import Books
from umbel.console.page import render
from umbel.privacy.accounting.guarantee import DELTA, amount, guarantee, in_words
from umbel.privacy.accounting.odometer import clients_to_date
from umbel.privacy.accounting.rows import row_guarantee, rows_to_date
from umbel.privacy.gate.charges import paper_spent
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.site import Site
from umbel.privacy.gate.site_log import SiteLog
from umbel.privacy.gate.store import beside
from umbel.protocol.cli import command_group, console, csv_cell, errors_in_one_line, printable
from umbel.protocol.errors import LedgerError
from umbel.protocol.home import write_atomically
from umbel.protocol.words import count_of

app = command_group("Read a site's ledger.")

_LedgerPath = Annotated[Path, typer.Argument(metavar="PATH", envvar="UMBEL_LEDGER_PATH", help="The ledger file.")]
_Delta = Annotated[float, typer.Option(min=0, max=0.999, help="Delta of the (epsilon, delta) guarantee.")]


@app.command()
def show(
    path: _LedgerPath,
    delta: _Delta = DELTA,
    to_date: Annotated[
        bool, typer.Option("--to-date", help="Add the epsilon to date, for releases that were not planned in advance.")
    ] = False,
) -> None:
    """Print what each client has spent, by the guarantee and, separately, by the paper's heuristic."""
    accounts = opened(path).accounts()
    # A ledger in which no release hid rows says the same of a row as of its client.
    rows = any(release.by_rows for account in accounts.values() for release in account)
    heads = ["client", "participations", "epsilon", f"epsilon at delta {delta:g}"]
    heads += ["epsilon to date"] * to_date + [f"a row's epsilon at delta {delta:g}"] * rows
    heads += ["a row's epsilon to date"] * (rows and to_date) + ["paper's budget"]
    table = Table(*heads, title=Text(printable(str(path))))
    with errors_in_one_line():
        for client, account in accounts.items():
            cells = [str(client), str(sum(account.values())), *in_words(guarantee(account, delta))]
            cells += [amount(clients_to_date(account, delta))] * to_date
            cells += [in_words(row_guarantee(account, delta))[1]] * rows
            cells += [amount(rows_to_date(account, delta))] * (rows and to_date)
            table.add_row(*cells, amount(paper_spent(account)))
    terminal = console()
    terminal.print(table)
    terminal.print(
        "epsilon: the guarantee between any two data sets of a client, over all its releases, for tasks fixed in "
        "advance. Gaussian noise has an epsilon only at a delta. A client has no guarantee after a release without a "
        "public clip norm, or with an open choice. "
        "paper's budget: the sum of n/nu, a heuristic that guarantees nothing.",
        soft_wrap=True,
    )
    if rows:
        terminal.print(
            "a row's epsilon: the guarantee between two data sets of a client that differ by one row, added or "
            "removed. It hides each single row, and not what the client's rows have in common.",
            soft_wrap=True,
        )
    if to_date:
        terminal.print(
            f"to date: an epsilon at delta {delta:g} that holds at all times at once, even if servers choose each "
            "release after they have seen the earlier ones. The other figures hold for tasks fixed in advance.",
            soft_wrap=True,
        )
    if messages := sum(row["messages"] for row in opened(path).table("evaluations") if row["run"]):
        terminal.print(
            f"Servers asked for reports in {count_of(messages, 'message')}. This ledger does not count exact losses of "
            "validation clients (exact-losses, or no budget).",
            soft_wrap=True,
        )


@app.command()
def report(
    path: _LedgerPath,
    html: Annotated[Path | None, typer.Option(help="File for one page that needs no other file.")] = None,
    node_config: Annotated[
        str, typer.Option(help="The node's configuration, to show what its limits leave to each client.")
    ] = "",
    delta: _Delta = DELTA,
) -> None:
    """Report what each client spent and has left, and for each run its researcher, its approval and its cost.

    Without --html, print it as JSON.
    """
    with errors_in_one_line():
        site = Site.of(entries_of(node_config)) if node_config else None
        books = Books(path, site, delta)
        if html is None:
            typer.echo(json.dumps(books.as_json(), indent=1, default=str))
            return
        write_atomically(html, render(books).encode(), private=True)
    typer.echo(html)


Kept = StrEnum("Kept", ["charges", "clients", "evaluations", "sent", "ended", "requests", "signed"])
"""Tables that can be exported."""


@app.command()
def export(
    path: _LedgerPath,
    table: Annotated[
        Kept, typer.Option(help="Charges, the numbers of a table's clients, or the site's records of runs.")
    ] = Kept.charges,
) -> None:
    """Write every charge, or another table of the ledger's file, to standard output as CSV, oldest first."""
    ledger, writer = opened(path), None
    for row in ledger.rows() if table is Kept.charges else ledger.table(table):
        if writer is None:
            writer = csv.DictWriter(sys.stdout, list(row))
            writer.writeheader()
        # A run's name, and what a request asks, are its server's.
        plain = {name: printable(value) if isinstance(value, str) else value for name, value in row.items()}
        writer.writerow({name: csv_cell(value) for name, value in plain.items()})


@app.command()
def create(path: _LedgerPath) -> None:
    """Make a new, empty ledger. If a site's policy sets a limit, its node does not make one by itself."""
    with errors_in_one_line():
        if path.exists():
            raise LedgerError(f"{path} exists already", code="ledger.exists")
        Ledger.create(path)
    typer.echo(f"{path} is a new, empty ledger")


@app.command()
def check(path: _LedgerPath) -> None:
    """Check that the file is an intact ledger; exit with an error if not."""
    typer.echo(f"{path} is an intact ledger with {count_of(charges_in(opened(path)), 'charge')}")


@app.command()
def restore(path: _LedgerPath) -> None:
    """Charge again what the site's log records and an older copy of the ledger lacks.

    Until then a site with an older ledger refuses everything. If the ledger is lost, first restore a backup or create
    an empty one.
    """
    with errors_in_one_line():
        opened(path)
        number = SiteLog(beside(path)).restored()
    typer.echo(f"{path} has {count_of(number, 'charge')} of its log again")


@app.command()
def backup(
    path: _LedgerPath,
    copy: Annotated[Path, typer.Argument(metavar="COPY", help="A new file; the copy of the log lies beside it.")],
) -> None:
    """Copy the ledger and its log, also while the site runs, and check the copies."""
    with errors_in_one_line():
        if copy.exists():
            raise LedgerError(f"{copy} exists already; name another file", code="ledger.exists")
        ledger, log, lines = opened(path), SiteLog(beside(path)), 0
        # The log first: then the copied ledger has all charges that the copied log records.
        if log.path.exists():
            lines = log.copy_to(beside(copy))
        ledger.copy_to(copy)
        charges = charges_in(Ledger(copy, whole=True))
    typer.echo(f"{copy} is a copy of {path}, with {count_of(charges, 'charge')}; its log has {count_of(lines, 'line')}")


def charges_in(ledger: Ledger) -> int:
    """Return the number of charges in a ledger."""
    return sum(sum(account.values()) for account in ledger.accounts().values())


def opened(path: Path) -> Ledger:
    """Return an intact ledger, or end the command. It may be another site's."""
    with errors_in_one_line():
        return Ledger(path, whole=True).distrust()
