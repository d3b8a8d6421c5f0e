"""``python -m umbel.cli.parts server-metrics``: runs and their sites for Prometheus, read off the status of each run.

No series depends on a client's data, choice or loss. Rounds, releases and refusals are what any site's log tells, too.
"""

from __future__ import annotations

import glob
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from prometheus_client.metrics_core import Metric

from umbel.protocol.cli import command_line, errors_in_one_line
from umbel.protocol.errors import UmbelError
from umbel.protocol.metrics import Labels, machine, metric, publish, watched
from umbel.protocol.presence import Presence
from umbel.protocol.words import one_line
from umbel.server.run_folder import RunFolder
from umbel.server.runs import DAMAGE, all_runs, home_of_runs
from umbel.server.status import RunState

_PROCESSES = ("umbel server start", "flower-superlink", "flwr-serverapp")
_RECENT_S = 86_400.0
"""Runs that have written nothing for a day are left out: each would stay a series for ever."""


def series(database: Path | None, certificates: dict[str, Path]) -> list[Metric]:
    """Return all series of a server."""
    states: dict[Labels, float] = {}
    rounds: dict[Labels, float] = {}
    most: dict[Labels, float] = {}
    seconds: dict[Labels, float] = {}
    stages: dict[Labels, float] = {}
    paused: dict[Labels, float] = {}
    written: dict[Labels, float] = {}
    sites: dict[Labels, float] = {}
    releases: dict[Labels, float] = {}
    refusals: Counter[Labels] = Counter()
    for path in all_runs():
        folder = RunFolder(path)
        try:
            status = folder.read_status()
        except (UmbelError, OSError):  # a simulation, or another server's folder
            continue
        if time.time() - status.written > _RECENT_S:
            continue
        run: Labels = (one_line(path.name),)  # which may be no text
        states |= {(*run, str(state)): float(state is status.state) for state in RunState}
        rounds[run], most[run], written[run] = min(status.round, status.rounds), status.rounds, status.written
        paused[run] = float(status.paused > 0)
        there = Counter(site.presence for site in status.sites)
        sites |= {(*run, str(state)): there[state] for state in Presence}
        for site in status.sites:
            own: Labels = (*run, site.name)
            releases[own] = site.releases
            for code, many in site.refusals.items():
                refusals[(*own, code)] += many
        with suppress(UmbelError, OSError, *DAMAGE):  # a damaged run hides no other
            if history := folder.read_history():
                seconds[run] = history[-1].seconds
                stages |= {(*run, stage): value for stage, value in history[-1].stages.items()}
    found = [
        metric("umbel_run_state", "1 for the state of a run.", states, "run", "state"),
        metric("umbel_run_round", "The round that is next or under way; after the end, the last.", rounds, "run"),
        metric("umbel_run_rounds", "Maximum rounds.", most, "run"),
        metric("umbel_run_round_seconds", "Seconds of the last round.", seconds, "run"),
        metric("umbel_run_stage_seconds", "Seconds of the last round, by stage.", stages, "run", "stage"),
        metric("umbel_run_paused", "1 while a run waits for sites.", paused, "run"),
        metric("umbel_run_written_timestamp_seconds", "Time of a run's last status.", written, "run"),
        metric("umbel_run_sites", "Sites of a run, by state.", sites, "run", "state"),
        metric("umbel_run_releases_total", "Releases of a site's clients in a run.", releases, "run", "site"),
        metric("umbel_run_refusals_total", "Messages that a site refused, by code.", refusals, "run", "site", "code"),
    ]
    if database is not None:
        size = sum(map(_size, database.parent.glob(f"{glob.escape(database.name)}*")))
        found.append(metric("umbel_server_database_bytes", "Size of the SuperLink's database on disk.", size))
    return [*found, *machine(home_of_runs(), certificates, _PROCESSES, "umbel_server")]


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):  # SQLite removes its journals
        return path.stat().st_size
    return 0


def main(
    database: Annotated[Path | None, typer.Option(help="The SuperLink's database.")] = None,
    certificate: Annotated[list[Path], typer.Option(help="A certificate to watch. May be repeated.")] = [],  # noqa: B006
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Serve the metrics at this address.", show_default="print them")
    ] = "",
) -> None:
    """Print the metrics of this server's runs for Prometheus, or serve them. Run it where the ServerApp's runs are."""
    with errors_in_one_line():
        certificates = watched(certificate)
        publish(lambda: series(database, certificates), listen)


app = command_line(main)
