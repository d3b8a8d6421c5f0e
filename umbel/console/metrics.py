"""``python -m umbel.cli.parts metrics``: a site for Prometheus, read off its journal.

No series depends on a client's data, choice or loss. All follow from what was asked, decided and charged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from prometheus_client.metrics_core import Metric

from umbel.client.checks import entries_of
from umbel.client.readiness import Readiness
from umbel.console.books import Books
from umbel.privacy.site.charges import Limits
from umbel.privacy.site.entry import Decision
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.refusals import PUBLIC
from umbel.privacy.site.runs import Status
from umbel.privacy.site.totals import Head
from umbel.protocol.cli import command_line
from umbel.protocol.errors import UmbelError
from umbel.protocol.metrics import machine, metric, publish, watched

_OTHER = "other"
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
_CODE = re.compile(r"\[([a-z]+\.[a-z0-9-]+)\]")
_MESSAGES = ("query", "query.channel", "query.keep", "train", "evaluate", "approval", "ledger")


class Reading:
    """The series of a site's journal, read again only after a change: a scraper asks every few seconds.

    `books` returns the books as they are now: a node reads the policy's file for each message, too.
    """

    def __init__(self, books: Callable[[], Books]) -> None:
        self.ledger, self._books = books().ledger, books
        self._seen: tuple[Head, Limits] | None = None
        self._series: list[Metric] = []

    def series(self) -> list[Metric]:
        """Return them; none before the journal exists. Raises `UmbelError` if it is refused."""
        if not self.ledger.exists():
            return []
        books = self._books()
        journal = Journal(self.ledger, witness=books.site.witness_folder if books.site else None)
        if (now := (journal.head, books.limits)) != self._seen:
            self._series, self._seen = _known(books), now
        return self._series


def series(reading: Reading, readiness: Readiness, certificates: dict[str, Path]) -> list[Metric]:
    """Return all series of a site as it is now; if its journal is refused, only that and the machine's."""
    fault = readiness.fault()
    try:
        known = reading.series()
    except UmbelError as error:
        known, fault = [], error
    return [
        metric("umbel_site_ready", "1 if the site can answer: disk, journal, policy and data are usable.", not fault),
        *known,
        # Without the memory of its processes: it grows with the rows of the clients that compute.
        *machine(reading.ledger.parent, certificates, (), "umbel_site"),
    ]


def _known(books: Books) -> list[Metric]:
    lines = books.lines
    messages: Mapping[tuple[str, ...], float] = Counter((_kind(line["message"]), line["decision"]) for line in lines)
    # A code outside `PUBLIC` may depend on data. A reason without a code is a fault.
    refused = [line["reason"] for line in lines if line["decision"] in (Decision.REFUSED, Decision.PARTLY)]
    codes = [code for reason in refused for code in _CODE.findall(reason) or [""]]
    refusals = Counter(code if code in PUBLIC else _OTHER for code in codes)
    accounts = books.opened.accounts().values()
    alike = Counter(tuple(account.items()) for account in accounts)
    used = [(books.used(dict(account)), many) for account, many in alike.items()]
    left = [1 - part for part, many in used if part is not None for _ in range(many)]
    requests = {str(status): 0 for status in Status} | Counter(str(one.status) for one in books.requests)
    runs = {line["run"] for line in lines if line["run"] and line["message"] != "approval"}
    quantiles = {f"{q:g}": float(np.quantile(left, q)) for q in _QUANTILES} if left else {}
    last = datetime.fromisoformat(lines[-1]["at"]).timestamp() if lines else 0.0
    return [
        metric(
            "umbel_site_messages_total",
            "Messages in the journal, by type and decision.",
            messages,
            "message",
            "decision",
        ),
        metric("umbel_site_refusals_total", "Refusals and faults in the journal, by code.", refusals, "code"),
        metric(
            "umbel_site_releases_total", "Releases charged in the journal.", sum(sum(one.values()) for one in accounts)
        ),
        metric("umbel_site_clients", "Clients that have released something.", len(accounts)),
        metric("umbel_site_requests", "Requests to the site's people, by status.", requests, "status"),
        metric("umbel_site_runs_total", "Runs that asked something.", len(runs)),
        metric(
            "umbel_site_budget_left_ratio",
            "Part of the budget that clients which took part have left, as quantiles over them.",
            quantiles,
            "quantile",
        ),
        metric("umbel_site_last_message_timestamp_seconds", "Time of the last message in the journal.", last),
    ]


def _kind(message: str) -> str:
    """Return a type of message that umbel has; a server may send any other, and each would stay a series for ever."""
    return message if message in _MESSAGES else _OTHER


@command_line
def app(
    node_config: Annotated[
        str, typer.Argument(metavar="NODE_CONFIG", help="The node's configuration, as for umbel site check.")
    ] = "",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Serve the metrics at this address.", show_default="print them")
    ] = "",
    certificate: Annotated[list[Path], typer.Option(help="A certificate to watch. May be repeated.")] = [],  # noqa: B006
) -> None:
    """Print a site's metrics for Prometheus, or serve them."""
    reading = Reading(lambda: Books.of(node_config))
    readiness = Readiness.of(entries_of(node_config))
    assert readiness is not None, "a site with books has a ledger's path"
    certificates = watched(certificate)
    publish(lambda: series(reading, readiness, certificates), listen)
