"""``python -m privacy``: plan a run's privacy, read a site's ledger and its log."""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from datetime import UTC, datetime
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from privacy import approvals
from privacy.accountant import Guarantee, formal
from privacy.charges import Account
from privacy.ledger import Ledger
from privacy.plan import plan
from privacy.site_log import SUFFIX, Decision, Line, SiteLog, beside
from protocol.cli import errors_in_one_line, fail, printable
from protocol.errors import LedgerError, LogError
from protocol.home import umbel_home
from protocol.release import Release

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
_Delta = Annotated[float, typer.Option(help="Delta of the (epsilon, delta) guarantee.")]


@app.command("plan")
def plan_command(
    parameters: Annotated[int, typer.Option(help="n, the number of parameters of the model.")],
    noise_multiplier: Annotated[float, typer.Option(help="nu.")],
    hypotheses: Annotated[int, typer.Option(help="k.")],
    clients: Annotated[int, typer.Option(help="Number of training clients.")],
    clients_per_round: Annotated[int, typer.Option(help="U.")],
    rounds: Annotated[int, typer.Option(help="Number of rounds.")],
    delta: _Delta = 1e-5,
) -> None:
    """Print what a run would cost its clients, before anything is run."""
    try:
        figures = plan(parameters, noise_multiplier, hypotheses, clients, clients_per_round, rounds, delta)
    except ValueError as error:
        fail(str(error))
    table = Table("figure", "value", "what it means", title="A planned run")
    add = table.add_row
    median, maximum = figures.median_participations, figures.max_participations
    add("cost a participation", f"{figures.cost:.4g}", "n/nu, within one radius")
    add(
        "participations",
        f"median {median}, most {maximum}",
        "expected, over all clients",
    )
    add(
        "heuristic spend",
        f"median {median * figures.cost:.4g}, most {maximum * figures.cost:.4g}",
        "radius update: the paper's figure, no guarantee",
    )
    add(
        "pure epsilon",
        f"median {figures.formal_median.pure:.4g}, most {figures.formal_max.pure:.4g}",
        "radius public: formal, for updates one radius apart",
    )
    add(
        f"epsilon at delta {delta:g}",
        f"median {figures.formal_median.epsilon:.4g}, most {figures.formal_max.epsilon:.4g}",
        "radius public: formal, numerical composition or the pure one if smaller",
    )
    add(
        "for any two updates",
        f"median {figures.any_median.epsilon:.4g}, most {figures.any_max.epsilon:.4g}",
        f"epsilon at delta {delta:g}, radius public, from the same hypothesis",
    )
    add("noise against update", f"{figures.noise_to_update:.3g}", "left in a hypothesis after averaging, in radii")
    add("step size x curvature", f"< {figures.largest_curvature_step:.3g}", "or the rounds diverge")
    console = Console()
    console.print(table)
    for warning in figures.warnings:
        console.print(f"Warning: {warning}", style="yellow", soft_wrap=True)


@ledger_app.command()
def show(path: _LedgerPath, delta: _Delta = 1e-5) -> None:
    """Print what each client has spent; heuristic and formal spends are never added up."""
    accounts = _open(path).accounts()
    table = Table(
        "client",
        "participations",
        "heuristic",
        "formal: pure",
        f"formal: at delta {delta:g}",
        "for any two updates",
        title=str(path),
    )
    by_client: dict[int, list[Account]] = defaultdict(list)
    for account in accounts:
        by_client[account.client].append(account)
    for client, own in sorted(by_client.items()):
        rest = [account for account in own if not account.release.formal]
        releases = {account.release: account.times for account in own if account.release.formal}
        near, any_two = _guarantees(frozenset(releases.items()), delta)
        table.add_row(
            str(client),
            str(sum(account.times for account in own)),
            f"{float(sum((account.spent for account in rest), Fraction(0))):.4g}",
            f"{near.pure:.4g}",
            f"{near.epsilon:.4g}",
            f"{any_two.epsilon:.4g}",
        )
    console = Console()
    console.print(table)
    console.print(
        "heuristic: radius update, n/nu within the norm of each update, no guarantee. "
        "formal: radius public, given the hypothesis that was chosen, for updates one radius apart; "
        "clipping keeps any two within two radii.",
        soft_wrap=True,
    )


@cache
def _guarantees(releases: frozenset[tuple[Release, int]], delta: float) -> tuple[Guarantee, Guarantee]:
    """Return the guarantee one and two radii apart; many clients have released the same."""
    return formal(dict(releases), delta), formal(dict(releases), delta, distance=2.0)


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
    charges = sum(account.times for account in ledger.accounts())
    typer.echo(f"{path} is a whole ledger with {charges} charges")


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
        charges = sum(account.times for account in _open(ledger).accounts()) if ledger.exists() else 0
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
