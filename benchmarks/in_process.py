"""umbel's rounds in this process, from messages to the ledger: messages, gate, strategy, all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import client.app
from server.rounds import State, initial_hypotheses, run_rounds
from server.settings import Settings
from simulation.grid import InProcessGrid


def prepare(config: Mapping[str, Any]) -> Callable[[], list[float]]:
    """Return what does the rounds of a run config and returns the validation loss of each, and after the last.

    What comes before the first round is done when it returns: data are open, the node has said what it
    hosts.
    """
    settings, grid = Settings.parse(config), InProcessGrid(client.app.app, config)
    start = initial_hypotheses(settings, grid)
    settings.strategy.roster(grid)
    state = State(hypotheses=start, best=start)

    def rounds() -> list[float]:
        run_rounds(settings, grid, state, lambda state: None)
        if any(entry.lost_nodes for entry in state.history):
            raise RuntimeError("the simulated node refused; the log says why")
        return [np.nan if entry.loss is None else entry.loss for entry in state.history]

    return rounds
