"""umbel's rounds in this process: messages, gate, ledger, strategy, all but what a run writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from benchmarks.measure import Reading
from umbel.server.run import Run
from umbel.simulation.in_process import play
from umbel.strategies import Callback


class Laps(Callback):
    """Notes something of a run when all is ready for its first round, and then before each round."""

    def __init__(self, note: Callable[[Run], Any]) -> None:
        self._note = note
        self.notes: list[Any] = []

    def begin(self) -> None:
        """Note how it starts."""
        self.notes.append(self._note(self.run))

    def before_round(self, round: int, arrays: ArrayRecord) -> None:
        """Note where it stands."""
        self.notes.append(self._note(self.run))


def rounds(config: Mapping[str, Any], *observers: Callback) -> tuple[float, list[float]]:
    """Do the rounds of a run config; return their seconds, and the validation losses after 0, 1, 2, ... of them.

    Data are open and the node has said what it hosts before the clock starts.
    """
    clock = Laps(lambda _: time.perf_counter())
    run = play(config, observers=[*observers, clock])
    seconds = time.perf_counter() - clock.notes[0]
    return seconds, [np.nan if entry.loss is None else entry.loss for entry in run.state.history]


def go(config: Mapping[str, Any]) -> Reading:
    """Do the rounds of a run config, and return what one takes and the last loss."""
    seconds, losses = rounds(config)
    return Reading(seconds / int(config["rounds"]), losses[-1])
