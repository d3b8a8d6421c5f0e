"""``umbel site metrics``: a site for Prometheus, read off its ledger and log.

No series depends on a client's data, choice or loss. All follow from what was asked, decided and charged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from umbel.console.books import Books
from umbel.privacy.gate.refusals import PUBLIC
from umbel.privacy.gate.runs import Status
from umbel.privacy.gate.site_log import Decision, SiteLog
from umbel.privacy.gate.store import beside
from umbel.protocol.cli import command_line, errors_in_one_line
from umbel.protocol.errors import UmbelError
from umbel.protocol.metrics import Series, machine, publish

_OTHER = "other"
_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
_CODE = re.compile(r"\[([a-z]+\.[a-z0-9-]+)\]")
_PROCESSES = ("umbel site executor", "umbel site start", "umbel site supernode")


def series(books: Books, certificates: dict[str, Path]) -> list[Series]:
    """Return all series of a site as it is now; if its ledger or log is refused, only that and the machine's."""
    try:
        SiteLog(beside(books.ledger)).check_end()
        known, ready = _known(books.now()), 1.0
    except UmbelError:
        known, ready = [], 0.0
    return [
        Series.of("umbel_site_ready", "1 if ledger and log are usable, so that the site can answer.", ready),
        *known,
        *machine(books.ledger.parent, certificates, _PROCESSES, "umbel_site"),
    ]


def _known(books: Books) -> list[Series]:
    lines = books.lines
    messages = Counter((line["message"], line["decision"]) for line in lines)
    # A code outside `PUBLIC` may depend on data. A reason without a code is a fault.
    refused = [line["reason"] for line in lines if line["decision"] in (Decision.REFUSED, Decision.PARTLY)]
    codes = [code for reason in refused for code in _CODE.findall(reason) or [""]]
    refusals = Counter(code if code in PUBLIC else _OTHER for code in codes)
    releases = [client.releases for client in books.clients]
    requests = {str(status): 0 for status in Status} | Counter(str(one.status) for one in books.requests)
    left = [1 - client.used for client in books.clients if client.used is not None]
    quantiles = {f"{q:g}": float(np.quantile(left, q)) for q in _QUANTILES} if left else {}
    last = datetime.fromisoformat(lines[-1]["at"]).timestamp() if lines else 0.0
    return [
        Series(
            "umbel_site_messages_total",
            "Messages in the log, by type and decision.",
            {(("message", kind), ("decision", decision)): many for (kind, decision), many in messages.items()},
        ),
        Series.of("umbel_site_refusals_total", "Refusals and faults in the log, by code.", refusals, "code"),
        Series.of("umbel_site_releases_total", "Releases charged in the ledger.", sum(releases)),
        Series.of("umbel_site_clients", "Clients that have released something.", len(books.clients)),
        Series.of("umbel_site_requests", "Requests to the site's people, by status.", requests, "status"),
        Series.of("umbel_site_runs_total", "Runs that asked something.", len(books.runs)),
        Series.of(
            "umbel_site_budget_left_ratio",
            "Part of the budget that clients which took part have left, as quantiles over them.",
            quantiles,
            "quantile",
        ),
        Series.of("umbel_site_last_message_timestamp_seconds", "Time of the last line of the log.", last),
    ]


def main(
    node_config: Annotated[
        str, typer.Argument(metavar="NODE_CONFIG", help="The node's configuration, as for umbel site check.")
    ] = "",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Serve the metrics at this address.", show_default="print them")
    ] = "",
    certificate: Annotated[list[Path], typer.Option(help="A certificate to watch. May be repeated.")] = [],  # noqa: B006
) -> None:
    """Print a site's metrics for Prometheus, or serve them."""
    with errors_in_one_line():
        books = Books.of(node_config)

        def collect() -> Sequence[Series]:
            return series(books, {path.name: path for path in certificate})

        publish(collect, listen)


app = command_line(main)
