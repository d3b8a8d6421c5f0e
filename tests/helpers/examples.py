"""How many examples Hypothesis tries: as a test says, and ten times as many in `make test-all`."""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("TEST_EXAMPLES", "1"))


def examples(number: int) -> int:
    """Return how many examples to try where a test of the first tier tries `number`."""
    return number * FACTOR
