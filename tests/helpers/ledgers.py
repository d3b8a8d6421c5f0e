"""What clients have spent."""

from __future__ import annotations

from fractions import Fraction

from privacy.charges import paper_spent
from privacy.ledger import Ledger
from privacy.memory_ledger import MemoryLedger


def spent(ledger: Ledger | MemoryLedger, client: int) -> Fraction | float:
    """Return what a client has spent by the paper's count, n/nu, whose sums are easily checked by hand."""
    return paper_spent(ledger.account(client))


def participations(ledger: Ledger | MemoryLedger, client: int) -> int:
    """Return how often a client was charged."""
    return sum(ledger.account(client).values())
