"""Rounds of runs that never were."""

from __future__ import annotations

from typing import Any

from umbel.server.history import Round


def a_round(number: int, **changes: Any) -> Round:
    """Return a round of ten clients, all of which released, to two hypotheses; in round 0 nobody trains."""
    trains = number > 0
    values: dict[str, Any] = {
        "number": number,
        "loss": 0.5,
        "metric": 0.5,
        "asked": 10 * trains,
        "releases": 10 * trains,
        "lost_nodes": 0,
        "groups": [4, 6] * trains,
        "nearest": [0.5, 0.5],
        "moved": trains,
        "best_round": min(number, 1),
        "median_participations": 1.5,
        "max_participations": 3,
        "seconds": 0.25,
    }
    return Round(**values | changes)
