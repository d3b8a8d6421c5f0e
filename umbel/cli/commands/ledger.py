"""``umbel ledger``: what a site's clients have spent."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from umbel.cli.commands.terminal import console
from umbel.privacy.accounting.guarantee import DELTA, amount, guarantee, in_words
from umbel.privacy.gate.charges import paper_spent
from umbel.privacy.gate.ledger import Ledger
from umbel.protocol.cli import fail
from umbel.protocol.errors import LedgerError

app = typer.Typer(add_completion=False, suggest_commands=False, help="Read a site's ledger.", no_args_is_help=True)

_LedgerPath = Annotated[Path, typer.Argument(metavar="PATH", help="The ledger file.")]
_Delta = Annotated[float, typer.Option(min=0, max=0.999, help="Delta of the (epsilon, delta) guarantee.")]


@app.command()
def show(path: _LedgerPath, delta: _Delta = DELTA) -> None:
    """Print what each client has spent; the guarantee and the paper's heuristic are never added up."""
    table = Table(
        "client", "participations", "epsilon", f"epsilon at delta {delta:g}", "paper's budget", title=str(path)
    )
    for client, account in opened(path).accounts().items():
        found = guarantee(account, delta)
        table.add_row(str(client), str(sum(account.values())), *in_words(found), amount(paper_spent(account)))
    terminal = console()
    terminal.print(table)
    terminal.print(
        "epsilon: what is guaranteed between any two data sets of a client, over all that it ever released, for "
        "tasks fixed in advance; none where it once released without a public radius, or with an open choice. "
        "paper's budget: the sum of n/nu, a heuristic, which guarantees nothing.",
        soft_wrap=True,
    )


@app.command()
def export(path: _LedgerPath) -> None:
    """Write every charge to standard output as CSV, oldest first."""
    writer = None
    for row in opened(path).rows():
        if writer is None:
            writer = csv.DictWriter(sys.stdout, list(row))
            writer.writeheader()
        writer.writerow(row)


@app.command()
def create(path: _LedgerPath) -> None:
    """Make a new, empty ledger; a node makes none itself where its policy sets a limit."""
    if path.exists():
        fail(f"{path} is there already")
    try:
        Ledger.create(path)
    except LedgerError as error:
        fail(str(error))
    typer.echo(f"{path} is a new, empty ledger")


@app.command()
def check(path: _LedgerPath) -> None:
    """Say whether the file is a whole ledger; exit with an error if it is not."""
    ledger = opened(path)
    charges = charges_in(ledger)
    typer.echo(f"{path} is a whole ledger with {charges} charges")


def charges_in(ledger: Ledger) -> int:
    """Return how many charges a ledger holds."""
    return sum(sum(account.values()) for account in ledger.accounts().values())


def opened(path: Path) -> Ledger:
    """Return a whole ledger, or end the command."""
    try:
        return Ledger(path, whole=True)
    except LedgerError as error:
        fail(str(error))
