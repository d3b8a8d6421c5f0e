"""umbel's rounds in this process, from messages to the ledger: messages, gate, strategy, all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import umbel.client.app
from benchmarks.measure import Reading
from umbel.protocol.errors import FleetError
from umbel.server.history import State
from umbel.server.observer import Run
from umbel.server.observers import named
from umbel.server.rounds import initial_hypotheses, run_rounds
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid


def prepare(config: Mapping[str, Any], grid: InProcessGrid | None = None) -> Callable[[], list[float]]:
    """Return what does the rounds of a run config and returns the validation loss of each, and after the last.

    What comes before the first round is done when it returns: data are open, the node has said what it
    hosts. All rounds are done, whatever the config's patience. A `grid` of one's own sees the messages.
    """
    setup, grid = Setup.parse(config), grid or InProcessGrid(umbel.client.app.app, config)
    setup.fleet.roster(grid)
    start = initial_hypotheses(setup, grid)
    run = Run(setup, grid, State(hypotheses=start, best=start), named(setup))

    def rounds() -> list[float]:
        run_rounds(run)
        history = run.state.history
        if any(entry.lost_nodes for entry in history):
            raise FleetError("the simulated node refused; the log says why", code="nodes.refused")
        return [np.nan if entry.loss is None else entry.loss for entry in history]

    return rounds


def go(config: Mapping[str, Any]) -> Reading:
    """Do the rounds of a run config, and return what one takes and the last loss."""
    rounds = prepare(config)
    began = time.perf_counter()
    history = rounds()
    return Reading((time.perf_counter() - began) / int(config["rounds"]), history[-1])
