"""What clients have spent."""

from __future__ import annotations

from fractions import Fraction

from umbel.privacy.gate.charges import paper_spent
from umbel.privacy.gate.ledger import Ledger
from umbel.privacy.gate.memory_ledger import MemoryLedger


def spent(ledger: Ledger | MemoryLedger, client: int) -> Fraction | float:
    """Return what a client has spent by the paper's count, n/nu, whose sums are easily checked by hand."""
    return paper_spent(ledger.account(client))


def participations(ledger: Ledger | MemoryLedger, client: int) -> int:
    """Return how often a client was charged."""
    return sum(ledger.account(client).values())
