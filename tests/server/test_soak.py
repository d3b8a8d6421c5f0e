"""A long run in which nodes fail in every way, at random: nothing is used twice, nothing goes uncounted."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import numpy as np
import psutil
import pytest
from flwr.app import Error, Message

import umbel.client.app
from tests.helpers.ledgers import participations
from tests.helpers.scripted import After
from umbel.privacy.site.totals import Totals
from umbel.protocol.flower import ErrorCode
from umbel.server.history import State
from umbel.server.run import Run, initial_hypotheses
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid

pytestmark = pytest.mark.rest

ROUNDS = 80
NODES = 5


class FaultyGrid(InProcessGrid):
    """Nodes whose replies get lost, come late, come twice, or turn out to be errors."""

    def __init__(self, run_config: dict[str, Any], seed: int) -> None:
        super().__init__(umbel.client.app.app, run_config, NODES)
        self._rng = np.random.default_rng(seed)
        self._due: dict[str, int] = {}
        self._clock = 0
        self.faults = dict.fromkeys(("lost", "late", "error", "garbage"), 0)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._clock += 1
        return super().push_messages(messages)

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        if message.metadata.message_type not in ("train", "evaluate"):
            return reply
        fault = self._rng.choice(["lost", "late", "error", "garbage", "none"], p=[0.03, 0.05, 0.03, 0.03, 0.86])
        if fault != "none":
            self.faults[fault] += 1
        if fault in ("lost", "late"):
            late = self._clock + (10**9 if fault == "lost" else int(self._rng.integers(1, 4)))
            self._due[message.metadata.message_id] = late
        if fault == "error":
            reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, "it died"), reply_to=message)
        if fault == "garbage" and message.metadata.message_type == "train" and not reply.has_error():
            reply.content.metric_records["released"]["clients"] = [7]
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        there = [one for one in message_ids if self._due.get(one, 0) <= self._clock]
        return super().pull_messages(there)


@pytest.mark.slow
def test_many_rounds_of_faults(run_config: dict[str, Any]) -> None:
    config = run_config | {"rounds": ROUNDS, "clients-per-round": 20, "round-timeout": 0.02, "restarts": 1}
    grid, setup = FaultyGrid(config, seed=1), Setup.parse(config)
    start = initial_hypotheses(setup, grid)
    state = State.first(start)
    memory: list[int] = []

    def weigh(state: State) -> None:
        if state.history[-1].number in (30, ROUNDS):
            gc.collect()
            memory.append(psutil.Process().memory_info().rss)

    Run(setup, grid, state, [After(weigh)]).do()

    assert min(grid.faults.values()) > 5, "every kind of fault has happened"
    trained = [entry for entry in state.history if entry.asked]
    assert len(trained) == ROUNDS, "every round was finished"
    assert sum(entry.dropped for entry in state.history) > 5
    assert sum(entry.lost_nodes for entry in trained) > 20
    # What the server counts was charged at the node, and what was charged and got lost is not used.
    fleet = setup.fleet
    charged = np.zeros(100, np.int64)
    for context in grid.contexts.values():
        ledger = Totals(context.state)
        first = int(context.node_config["partition-id"])
        for local in range(100 // NODES):
            charged[first + NODES * local] = participations(ledger, first + NODES * local)
    assert (charged >= fleet.participations).all()
    assert fleet.participations.sum() == sum(entry.releases for entry in trained)
    assert charged.sum() > fleet.participations.sum()
    # It learns all the same.
    assert state.best_loss < 0.8
    # Replies that never come are not kept by the hundred: 50 rounds of them take next to nothing.
    assert memory[1] - memory[0] < 30 * 2**20
