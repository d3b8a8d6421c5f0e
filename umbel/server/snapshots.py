"""The releases of two rounds in the plane, for models of two parameters, as in figure 1 of the paper."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from umbel.protocol.arrays import flatten
from umbel.server.history import State
from umbel.strategies.base import Outcome

_PARTS = ("releases", "groups", "hypotheses")


@dataclass(frozen=True)
class Snapshot:
    """A round in the plane.

    Attributes
    ----------
    round : int
    releases : ndarray, shape (m, 2)
    groups : ndarray of int, shape (m,)
        The hypothesis that each release was assigned to; -1 in a round with too few releases.
    hypotheses : ndarray, shape (k, 2)
        The hypotheses at the start of the round.
    """

    round: int
    releases: NDArray[np.float64]
    groups: NDArray[np.int64]
    hypotheses: NDArray[np.float64]


class Snapshots:
    """Keeps the first round of a run and its best one.

    The best round started from the best hypotheses. If these come from the last training round, no round started from
    them. Without validation there is no best round. In both cases the last training round is kept.

    Parameters
    ----------
    state : State
        Before the first round.
    """

    def __init__(self, state: State) -> None:
        self.first: Snapshot | None = None
        self.best: Snapshot | None = None
        self._newest: Snapshot | None = None
        self._start = state.hypotheses

    def add(self, state: State, outcome: Outcome | None) -> bool:
        """Look at the finished round, and return whether anything was kept.

        Parameters
        ----------
        state : State
            After the round.
        outcome : Outcome or None
            The round's outcome; None if it only validated.
        """
        number = state.history[-1].number
        start, self._start = self._start, state.hypotheses
        if outcome is not None and outcome.releases is not None:
            self._newest = Snapshot(outcome.round, outcome.releases, outcome.groups, flatten(start))
        if self._newest is None or state.best_round not in (0, number):
            return False
        self.first = self.first or self._newest
        self.best = self._newest
        return True

    @classmethod
    def of_bytes(cls, state: State, content: bytes) -> Snapshots:
        """Return the snapshots in `content`, from `to_bytes`; `state` is the run's current state."""
        read, tensors = cls(state), safetensors.numpy.load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
        for name in ("first", "best"):
            if number := metadata.get(f"{name}.round"):
                setattr(read, name, Snapshot(int(number), *(tensors[f"{name}.{part}"] for part in _PARTS)))
        return read

    def to_bytes(self) -> bytes:
        """Return both rounds in safetensors format, with their numbers in its metadata."""
        kept = {name: one for name, one in (("first", self.first), ("best", self.best)) if one}
        tensors = {
            f"{name}.{part}": np.ascontiguousarray(getattr(one, part)) for name, one in kept.items() for part in _PARTS
        }
        return safetensors.numpy.save(tensors, {f"{name}.round": str(one.round) for name, one in kept.items()})
