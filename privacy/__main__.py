"""``python -m privacy``: plan a run's privacy, read a site's ledger and its log."""

from __future__ import annotations

import csv
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mechanisms.guarantee import DELTA, amount, guarantee, in_words
from mechanisms.plan import Task, plan, plan_for, what_helps
from privacy import approvals, planned
from privacy.charges import paper_spent
from privacy.ledger import Ledger
from privacy.site_log import SUFFIX, Decision, Line, SiteLog, beside
from protocol.cli import errors_in_one_line, fail, printable
from protocol.errors import LedgerError, LogError
from protocol.home import umbel_home
from protocol.release import LAPLACE

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
ledger_app = typer.Typer(help="Read a site's ledger.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger")

log_app = typer.Typer(help="Read a site's log: what servers asked, and what the site decided.", no_args_is_help=True)
app.add_typer(log_app, name="log")
app.add_typer(approvals.app, name="approvals")

_LogPath = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH", envvar="UMBEL_LEDGER_PATH", help="The log, or its ledger; by default $UMBEL_HOME/ledger.sqlite."
    ),
]
_LedgerPath = Annotated[Path, typer.Argument(metavar="PATH", help="The ledger file.")]
_Delta = Annotated[float, typer.Option(min=0, max=0.999, help="Delta of the (epsilon, delta) guarantee.")]


@app.command("plan")
def plan_command(
    parameters: Annotated[int, typer.Option(help="n, the number of parameters of the model.")],
    hypotheses: Annotated[int, typer.Option(help="k.")],
    clients: Annotated[int, typer.Option(help="Number of training clients.")],
    clients_per_round: Annotated[int, typer.Option(help="U.")],
    noise_multiplier: Annotated[float | None, typer.Option(help="nu; or give --target-epsilon.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds; with --noise-multiplier.")] = None,
    target_epsilon: Annotated[float | None, typer.Option(help="The epsilon that is wanted; nu is worked out.")] = None,
    participations: Annotated[
        int | None, typer.Option(help="The most often that a client takes part; with --target-epsilon.")
    ] = None,
    choice_epsilon: Annotated[
        float | None,
        typer.Option(help="Of the randomised choice.", show_default="open, or a quarter of the target a participation"),
    ] = None,
    mechanism: Annotated[str, typer.Option(help="laplace, gaussian, or package.module:Class.")] = LAPLACE,
    delta: _Delta = DELTA,
) -> None:
    """Print what a run would cost its clients, or what noise a wanted guarantee takes, before anything is run."""
    forward = noise_multiplier is not None and rounds is not None
    backward = target_epsilon is not None and participations is not None
    if forward == backward:
        fail("give --noise-multiplier and --rounds, or --target-epsilon and --participations")
    with errors_in_one_line():
        try:
            task, ways = Task(parameters, hypotheses, clients, clients_per_round, mechanism), {}
            if noise_multiplier is not None and rounds is not None:
                figures = plan(task, noise_multiplier, choice_epsilon or 0.0, rounds, delta)
            else:
                assert target_epsilon is not None, "one of the two was given"
                assert participations is not None, "one of the two was given"
                wanted = (task, target_epsilon, delta, participations, choice_epsilon)
                figures, ways = plan_for(*wanted), what_helps(*wanted)
        except ValueError as error:
            fail(str(error))
    planned.show(figures, ways, delta)


@ledger_app.command()
def show(path: _LedgerPath, delta: _Delta = DELTA) -> None:
    """Print what each client has spent; the guarantee and the paper's heuristic are never added up."""
    table = Table(
        "client", "participations", "epsilon", f"epsilon at delta {delta:g}", "paper's budget", title=str(path)
    )
    for client, account in _open(path).accounts().items():
        found = guarantee(account, delta)
        table.add_row(str(client), str(sum(account.values())), *in_words(found), amount(paper_spent(account)))
    console = Console()
    console.print(table)
    console.print(
        "epsilon: what is guaranteed between any two data sets of a client, over all that it ever released, for "
        "demands fixed in advance; none where it once released without a public radius, or with an open choice. "
        "paper's budget: the sum of n/nu, a heuristic, which guarantees nothing.",
        soft_wrap=True,
    )


@ledger_app.command()
def export(path: _LedgerPath) -> None:
    """Write every charge to standard output as CSV, oldest first."""
    writer = None
    for row in _open(path).rows():
        if writer is None:
            writer = csv.DictWriter(sys.stdout, list(row))
            writer.writeheader()
        writer.writerow(row)


@ledger_app.command()
def create(path: _LedgerPath) -> None:
    """Make a new, empty ledger; a node makes none itself where its policy sets a limit."""
    if path.exists():
        fail(f"{path} is there already")
    try:
        Ledger.create(path)
    except LedgerError as error:
        fail(str(error))
    typer.echo(f"{path} is a new, empty ledger")


@ledger_app.command()
def check(path: _LedgerPath) -> None:
    """Say whether the file is a whole ledger; exit with an error if it is not."""
    ledger = _open(path)
    charges = _charges(ledger)
    typer.echo(f"{path} is a whole ledger with {charges} charges")


def _charges(ledger: Ledger) -> int:
    return sum(sum(account.values()) for account in ledger.accounts().values())


def _open(path: Path) -> Ledger:
    try:
        return Ledger(path, whole=True)
    except LedgerError as error:
        fail(str(error))


@log_app.command("show")
def show_log(
    path: _LogPath = None,
    since: Annotated[datetime | None, typer.Option(help="Only messages from this time on (UTC).")] = None,
    refused: Annotated[bool, typer.Option(help="Only messages that were refused, or a part of them.")] = False,
) -> None:
    """Print a row for each message: when it came, what it asked, what the site decided and why."""
    log = SiteLog(_log_path(path))
    table = Table("", "time (UTC)", "run", "message", "asked", "decision", "paid", "reason", title=str(log.path))
    fault = None
    try:
        for line in log.lines():
            late = since is not None and datetime.fromisoformat(line["at"]) < since.replace(tzinfo=UTC)
            if not (late or (refused and line["decision"] == Decision.ANSWERED)):
                table.add_row(*_cells(line))
    except LogError as error:
        fault = str(error)
    Console().print(table)
    if fault is not None:
        fail(fault)


@log_app.command("check")
def check_log(path: _LogPath = None) -> None:
    """Say whether the log is whole, and agrees with the ledger; exit with an error if not."""
    log = SiteLog(_log_path(path))
    ledger = log.path.with_name(log.path.name.removesuffix(SUFFIX))
    with errors_in_one_line():
        lines = paid = 0
        last = "none"
        for line in log.lines():
            lines, last, paid = line["number"], line["hash"], paid + line["paid"]
        charges = _charges(_open(ledger)) if ledger.exists() else 0
        if charges < paid:
            raise LogError(
                f"{log.path} tells of {paid} charges, and the ledger {ledger} has {charges}: it may be an older copy"
            )
    typer.echo(f"{log.path} is a whole log of {lines} lines; the last hash is {last}")
    typer.echo(f"{paid} charges are on record, of {charges} in the ledger")


@log_app.command("set-aside")
def set_log_aside(path: _LogPath = None) -> None:
    """Rename a log that is damaged, or long, and begin another; the site refuses until a damaged one is set aside."""
    with errors_in_one_line():
        log = SiteLog(_log_path(path))
        typer.echo(f"{log.path} is a new log; the one before is {log.set_aside()}")


def _log_path(path: Path | None) -> Path:
    path = path or umbel_home() / "ledger.sqlite"
    return path if path.suffix == ".jsonl" else beside(path)


def _cells(line: Line) -> list[Text]:
    """Return what a row says of a line."""
    asked = "; ".join(
        f"{name}: " + ", ".join(f"{key.replace('_', '-')} {value}" for key, value in values.items() if value != "")
        for name, values in line["asked"].items()
    )
    cells = (line["number"], line["at"], line["run"], line["message"], asked, line["decision"], line["paid"])
    texts = [*map(str, cells), line["reason"]]
    return [Text(printable(text)) for text in texts]


if __name__ == "__main__":
    app()
