"""``umbel approvals``: list requests that wait for a site's approval, and approve or refuse them."""

from __future__ import annotations

import getpass
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from umbel.privacy.accounting.guarantee import DELTA, amount, guarantee, in_words, site_release
from umbel.privacy.gate.charges import paper_spent
from umbel.privacy.gate.consent import decide
from umbel.privacy.gate.runs import SHOWN, Request, Runs, Status
from umbel.privacy.mechanisms import MECHANISMS
from umbel.protocol.cli import command_group, console, errors_in_one_line, printable
from umbel.protocol.home import umbel_home
from umbel.protocol.release import Clipping, Kind, Release, ReleaseBy
from umbel.protocol.run_config import RunConfig
from umbel.protocol.words import count_of

app = command_group('List and decide requests to a site that sets approve = "ask".')

_Ledger = Annotated[
    Path | None,
    typer.Option("--ledger", envvar="UMBEL_LEDGER_PATH", help="The site's ledger; by default that of $UMBEL_HOME."),
]
_By = Annotated[
    str | None, typer.Option("--by", help="The person that decides.", show_default="the user of this machine")
]
_Reason = Annotated[str, typer.Option("--reason", help="Why, for the record.")]
_Digest = Annotated[str, typer.Argument(metavar="REQUEST", help="The request's name, as in the list.")]
# The training entries of a run config, in the order of a reader's questions.
_PLAN = (
    "strategy", "strategy-options", "model", "loss", "metric", "pretrained", "frozen", "local", "hypotheses", "rounds",
    "clients-per-round", "local-epochs", "local-steps", "batch-size", "step-size", "optimizer", "optimizer-options",
    "clip-gradient", "proximal", "message-noise", "noise-multiplier", "mechanism", "choice-epsilon",
    "max-participations", "noise-per", "clipping", "clip-norm", "clip-norm-decay", "clip-norm-floor", "restarts",
    "start-from", "validate-every",
)  # fmt: skip


@app.command("list")
def list_requests(
    ledger: _Ledger = None,
    decided: Annotated[bool, typer.Option("--all", help="Also print approved and refused requests.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Print every entry of the run config.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the requests as JSON.")] = False,
) -> None:
    """Print waiting requests, oldest first."""
    with errors_in_one_line():
        found = [one for one in _runs(ledger).requests() if decided or one.status is Status.WAITING]
        if as_json:
            rows = [asdict(one) | {"prices": dict(prices(one))} for one in found]
            typer.echo(json.dumps(rows, indent=1, default=str))
            return
        terminal = console()
        for request in found:
            terminal.print(_table(request, whole))
        if not found:
            typer.echo("no request waits" if not decided else "there are no requests")


@app.command()
def approve(digest: _Digest, ledger: _Ledger = None, by: _By = None, reason: _Reason = "") -> None:
    """Approve exactly this request for all runs, now and later, within the site's limits."""
    _decide(digest, Status.APPROVED, ledger, by, reason)


@app.command()
def refuse(digest: _Digest, ledger: _Ledger = None, by: _By = None, reason: _Reason = "") -> None:
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
    entries: dict[str, Any] = asks["config"]
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
    for name in entries if whole else _PLAN:
        if name in entries and (whole or entries[name] != ""):
            table.add_row(name, _cell(entries[name]))
    for name, value in asks["differs"].items():
        table.add_row(Text(f"otherwise: {name.replace('_', '-')}", style="red"), _cell(value))
    return table


def prices(request: Request) -> list[tuple[str, str]]:
    """Return what a client pays: for a participation, for as many as the run may ask of it, and for a report."""
    asks = request.asks
    run = RunConfig(**{name.replace("-", "_"): value for name, value in asks["config"].items()})
    by_site = ReleaseBy.SITE in (asks.get("release"), asks["differs"].get("release_by"))
    rows = _price(run, int(asks["n"]), by_site)
    if noise := asks.get("report-noise"):
        report = Release(Kind.REPORT, 2, noise, Clipping.PUBLIC, math.sqrt(2))
        rows.append(("price of a report", _cost({report: 1})))
    return rows


def _price(run: RunConfig, n: int, by_site: bool) -> list[tuple[str, str]]:
    """Return the price of a participation, in a site's sums or alone, and of the whole run."""
    if run.mechanism not in MECHANISMS:
        # A name may lead to any installed code, and the site has not approved it.
        return [("price", f"unknown: mechanism {run.mechanism!r} is other code, which this command does not run")]
    release = run.release(n, run.most_hypotheses)
    if by_site:
        release = site_release(release)
    most = min(run.rounds, run.max_participations or run.rounds)
    each = [("a participation", 1), (f"the run, at most {count_of(most, 'participation')} of a client", most)]
    return [(f"price of {what}", _cost({release: times})) for what, times in each]


def _cost(account: dict[Release, int]) -> str:
    pure, at_delta = in_words(guarantee(account))
    paper = amount(paper_spent(account))
    return (
        f"epsilon between any two data sets: {pure}; at delta {DELTA:g}: {at_delta}; paper's budget, heuristic: {paper}"
    )


def _cell(value: Any) -> Text:
    return Text(printable(str(value)))
