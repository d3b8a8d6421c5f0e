"""What clients have spent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

from flwr.app import Context

from umbel.privacy.accounting.guarantee import DELTA, Guarantee, guarantee
from umbel.privacy.accounting.rows import row_guarantee
from umbel.privacy.site import journal
from umbel.privacy.site.charges import paper_spent
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.totals import Totals
from umbel.protocol.home import umbel_home
from umbel.protocol.release import Release


def forget() -> None:
    """Open journals as a new process does, which has read none."""
    journal._states.clear()


def spent(ledger: Journal | Totals, client: int) -> Fraction | float:
    """Return what a client has spent by the paper's count, n/nu, whose sums are easily checked by hand."""
    return paper_spent(ledger.account(client))


def participations(ledger: Journal | Totals, client: int) -> int:
    """Return how often a client was charged."""
    return sum(ledger.account(client).values())


def ledger_of(context: Context) -> Journal | Totals:
    """Return the ledger of a site in umbel's home, or that of a simulated node."""
    path = umbel_home() / "ledger.jsonl"
    own = "data-path" in context.node_config and path.exists()
    return Journal(path) if own else Totals(context.state)


def all_spent(context: Context, clients: Iterable[int]) -> list[Fraction | float]:
    """Return what clients have spent."""
    ledger = ledger_of(context)
    return [spent(ledger, client) for client in clients]


def proven(releases: Mapping[Release, int], delta: float = DELTA) -> Guarantee:
    """Return what releases guarantee, which must be something."""
    found = guarantee(releases, delta)
    assert found is not None
    return found


def proven_rows(releases: Mapping[Release, int], delta: float = DELTA) -> Guarantee:
    """Return what releases guarantee for a row, which must be something."""
    found = row_guarantee(releases, delta)
    assert found is not None
    return found
