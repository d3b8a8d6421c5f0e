"""``umbel server status``: a run at real sites, as its operator sees it."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from umbel.nodes.presence import Presence
from umbel.protocol.cli import command_line, console, errors_in_one_line, printable
from umbel.protocol.durations import at_time, in_time
from umbel.protocol.words import count_of
from umbel.server.run_folder import RunFolder
from umbel.server.runs import LAST, find_run, reading
from umbel.server.status import SiteStatus, Status


def _state(site: SiteStatus) -> Text:
    since = f" since {at_time(site.since)}" if site.since else ""
    return Text(f"{site.presence}{since}", style="" if site.presence is Presence.ONLINE else "bold")


def _refusals(site: SiteStatus) -> str:
    return ", ".join(f"{times} x {printable(code) or 'no reason told'}" for code, times in site.refusals.items())


def _status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run: its name, its path, or last.")] = LAST,
) -> None:
    """Print a run's round, the time left, and its sites: who is there, what they released, and why they refused."""
    with errors_in_one_line(), reading(run):
        folder = RunFolder(find_run(run))
        status = folder.read_status()
        table = Table("", "", title=Text(printable(folder.path.name)), show_header=False)
        for name, value in _lines(folder, status):
            table.add_row(name, Text(value))
        console().print(table, _sites(status))


def _sites(status: Status) -> Table:
    table = Table("site", "state", "last reply", "training", "validation", "releases", "refusals")
    for site in status.sites:
        counts = (str(one) for one in (site.training, site.validation, site.releases))
        seen = at_time(site.seen) if site.seen else ""
        table.add_row(Text(printable(site.name)), _state(site), seen, *counts, Text(_refusals(site)))
    return table


def _lines(folder: RunFolder, status: Status) -> list[tuple[str, str]]:
    there = sum(site.presence is Presence.ONLINE for site in status.sites)
    history = folder.read_history()
    ended = folder.read_outcome()
    lines = [
        ("rounds", f"{min(status.round - 1, status.rounds)} of {status.rounds} done"),
        ("sites", f"{there} of {len(status.sites)} can be asked; a round needs {count_of(status.pause_below, 'site')}"),
        ("as of", at_time(status.written)),
    ]
    if ended:
        return [*lines, ("ended", printable(ended))]
    if status.paused:
        waits = f"since {at_time(status.paused)}, at most until {at_time(status.ends)}"
        return [*lines, ("paused", waits)]
    if history:
        left = (status.rounds - len(history)) * sum(one.seconds for one in history) / len(history)
        lines.append(("time left", f"about {in_time(max(0.0, left - (time.time() - status.written)))}"))
    return lines


app = command_line(_status)
