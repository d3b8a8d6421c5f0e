"""Rounds of runs that never were."""

from __future__ import annotations

from typing import Any

from umbel.server.history import Round


def a_round(number: int, **changes: Any) -> Round:
    """Return a round of ten clients, all of which released, to two hypotheses."""
    values: dict[str, Any] = {
        "number": number,
        "loss": 0.5,
        "metric": 0.5,
        "asked": 10,
        "releases": 10,
        "lost_nodes": 0,
        "groups": [4, 6],
        "nearest": [0.5, 0.5],
        "moved": True,
        "best_round": 1,
        "median_participations": 1.5,
        "max_participations": 3,
        "seconds": 0.25,
    }
    return Round(**values | changes)


def a_validation(number: int, **changes: Any) -> Round:
    """Return the round after the last, in which nobody trains."""
    return a_round(number, **{"asked": 0, "releases": 0, "groups": [], "moved": False} | changes)
