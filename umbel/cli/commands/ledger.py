"""``umbel ledger``: what a site's clients have spent."""

from __future__ import annotations

import csv
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from umbel.privacy.accounting.guarantee import DELTA, amount, guarantee, in_words
from umbel.privacy.gate.charges import paper_spent
from umbel.privacy.gate.ledger import Ledger
from umbel.protocol.cli import command_group, console, csv_cell, errors_in_one_line
from umbel.protocol.errors import LedgerError

app = command_group("Read a site's ledger.")

_LedgerPath = Annotated[Path, typer.Argument(metavar="PATH", help="The ledger file.")]
_Delta = Annotated[float, typer.Option(min=0, max=0.999, help="Delta of the (epsilon, delta) guarantee.")]


@app.command()
def show(path: _LedgerPath, delta: _Delta = DELTA) -> None:
    """Print what each client has spent; the guarantee and the paper's heuristic are never added up."""
    heads = ("client", "participations", "epsilon", f"epsilon at delta {delta:g}", "paper's budget")
    table = Table(*heads, title=str(path))
    for client, account in opened(path).accounts().items():
        found = guarantee(account, delta)
        table.add_row(str(client), str(sum(account.values())), *in_words(found), amount(paper_spent(account)))
    terminal = console()
    terminal.print(table)
    terminal.print(
        "epsilon: what is guaranteed between any two data sets of a client, over all that it ever released, for "
        "tasks fixed in advance; none where it once released without a public clip norm, or with an open choice. "
        "paper's budget: the sum of n/nu, a heuristic, which guarantees nothing.",
        soft_wrap=True,
    )
    if messages := sum(row["messages"] for row in opened(path).table("evaluations") if row["run"]):
        terminal.print(
            f"Clients were asked to report in {messages} messages. Exact losses of validation clients (exact-losses, "
            "or no budget) are not in this ledger.",
            soft_wrap=True,
        )


Kept = StrEnum("Kept", ["charges", "clients", "evaluations", "sent", "ended", "requests"])
"""Tables that can be exported."""


@app.command()
def export(
    path: _LedgerPath,
    table: Annotated[
        Kept, typer.Option(help="Charges, a table's clients by number, or what the site remembers of runs.")
    ] = Kept.charges,
) -> None:
    """Write every charge, or another table of the ledger's file, to standard output as CSV, oldest first."""
    ledger, writer = opened(path), None
    for row in ledger.rows() if table is Kept.charges else ledger.table(table):
        if writer is None:
            writer = csv.DictWriter(sys.stdout, list(row))
            writer.writeheader()
        writer.writerow({name: csv_cell(value) for name, value in row.items()})


@app.command()
def create(path: _LedgerPath) -> None:
    """Make a new, empty ledger; a node makes none itself where its policy sets a limit."""
    with errors_in_one_line():
        if path.exists():
            raise LedgerError(f"{path} is there already", code="ledger.exists")
        Ledger.create(path)
    typer.echo(f"{path} is a new, empty ledger")


@app.command()
def check(path: _LedgerPath) -> None:
    """Say whether the file is a whole ledger; exit with an error if it is not."""
    typer.echo(f"{path} is a whole ledger with {charges_in(opened(path))} charges")


def charges_in(ledger: Ledger) -> int:
    """Return how many charges a ledger holds."""
    return sum(sum(account.values()) for account in ledger.accounts().values())


def opened(path: Path) -> Ledger:
    """Return a whole ledger, or end the command."""
    with errors_in_one_line():
        return Ledger(path, whole=True)
