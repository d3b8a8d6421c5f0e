"""A strategy whose every number is written down beforehand, and a run of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from umbel import models
from umbel.nodes.fleet import Fleet
from umbel.protocol.arrays import Arrays
from umbel.protocol.asked import Asked
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.records import from_array_record
from umbel.protocol.releases import Scores
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import TrainingSpec
from umbel.server.history import State
from umbel.server.run import Run
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid
from umbel.strategies import Callback
from umbel.strategies.base import HypothesisStrategy, Outcome

LINEAR = models.load("linear")


def theta(value: float) -> Arrays:
    """Two hypotheses of which every number is the same."""
    return {"weight": np.full((2, 1, 2), value, np.float32)}


def value_of(arrays: Arrays) -> float:
    (value,) = np.unique(arrays["weight"])
    return float(value)


T = TypeVar("T", bound=HypothesisStrategy)


def on(fleet: Fleet, strategy: T) -> T:
    """Return a strategy of umbel's nodes, whose methods a test may call; of two hypotheses, unless it says how many."""
    strategy.nodes, strategy.hypotheses, strategy.allows_several = fleet, strategy.hypotheses or 2, True
    return strategy


def sends(strategy: HypothesisStrategy, arrays: Arrays, task: TrainingSpec | None = None) -> None:
    """Have a strategy believe that a round trains from these hypotheses."""
    strategy.asked["train"] = Asked(Hypotheses(arrays), np.zeros(0, np.int64), {}, task=task)


class Scripted(HypothesisStrategy):
    """Training takes theta to theta + 1, and validating theta = 0, 1, 2, ... costs the losses given.

    A loss is None where no validation client answers. Rounds that are `stuck` have too few releases.
    """

    lost = 1
    """Nodes that do not answer, in each round."""
    merge = True

    def __init__(self, losses: Sequence[float | None] = (), stuck: Iterable[int] = ()) -> None:
        super().__init__(hypotheses=2)
        self.nodes: Fleet = ScriptedFleet(self)
        self.losses, self.stuck = losses, set(stuck)
        self.trained: list[tuple[int, float, ConfigRecord]] = []
        self.validated: list[tuple[int, float]] = []

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        self.now = value_of(from_array_record(arrays))
        self.trained.append((server_round, self.now, config))
        return [Message(RecordDict({"training": ConfigRecord()}), 100, "train", group_id=str(server_round))]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        assert ["training" in reply.content for reply in replies] == [True]
        self.nodes.participations[:2] += 1
        moved = None if server_round in self.stuck else theta(self.now + 1)
        released = np.array([0, 1])
        counts = np.array([0 if moved is None else 2, 0])
        return self.conclude(Outcome(server_round, released, np.zeros(2, np.int64), counts, None, 3, self.lost, moved))

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        if not self.losses:
            return []
        self.validated.append((server_round, value_of(from_array_record(arrays))))
        return [Message(RecordDict({"evaluation": ConfigRecord()}), 100, "evaluate", group_id=str(server_round))]


class ScriptedFleet(Fleet):
    """The clients of a scripted strategy: what they say is written down."""

    def __init__(self, strategy: Scripted) -> None:
        super().__init__()
        self.participations = np.array([0, 0, 0])
        self._strategy = strategy

    def roster(self, grid: Any) -> Any:
        return SimpleNamespace(nodes=[], simulated=True, validation=len(self._strategy.losses))

    def read(self, asked: Asked, replies: Iterable[Message]) -> Scores | None:
        strategy = self._strategy
        if not strategy.losses:
            return None
        assert ["evaluation" in reply.content for reply in replies] == [True]
        loss = strategy.losses[int(strategy.validated[-1][1])]
        return None if loss is None else Scores(loss, 2 * loss, 1)


class SpyGrid(InProcessGrid):
    """The in-process grid; keeps what goes through it and gives replies back in another order."""

    def __init__(self, app: Any, run_config: Any = {}) -> None:  # noqa: B006
        super().__init__(app, run_config)
        self.exchanges: list[list[list[str]]] = []
        self.lifetimes: list[float] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.exchanges.append([sorted(message.content) or [message.metadata.message_type] for message in messages])
        self.lifetimes.append(max(message.metadata.ttl for message in messages))
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return list(super().pull_messages(message_ids))[::-1]


def echo(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


def setup(strategy: HypothesisStrategy, **changes: Any) -> Setup:
    """Return a run of five rounds that validates in each."""
    plain: dict[str, Any] = {"rounds": 5, "restarts": 1, "round_timeout": 12.0, "step_size": 0.5}
    return Setup(RunConfig(**plain | changes), strategy, strategy.nodes, LINEAR, None)


class After(Callback):
    """Calls a function after each round, which may return why the run ends."""

    def __init__(self, call: Callable[[State], Any]) -> None:
        self._call = call

    def after_exchange(self, round: int, stages: dict[str, float]) -> Any:
        return self._call(self.run.state)


def run_of(strategy: HypothesisStrategy, *callbacks: Callback, **changes: Any) -> Run:
    """Return a run that will begin at theta(1) = 0."""
    asked = setup(strategy, **changes)
    return Run(asked, SpyGrid(echo), State.first(theta(0)), callbacks, "mine")
