"""The rounds of a strategy: one exchange evaluates the hypotheses after r rounds and trains round r + 1."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from logging import INFO
from typing import TYPE_CHECKING, Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from umbel.protocol.log import log

if TYPE_CHECKING:
    from umbel.strategies.base import HypothesisStrategy

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Callback:
    """Watches the rounds of a strategy. The first ``after_...`` method that returns a reason ends the run.

    Rounds of training are numbered from 1. Round r trains the hypotheses after r - 1 rounds.
    """

    logs: ClassVar[bool] = False
    """Whether it tells the log about the rounds itself."""
    run: Any = None
    """In umbel's ServerApp, the `umbel.server.run.Run`: its config, nodes, state and folder."""

    def begin(self) -> None:
        """Prepare, once the nodes are connected; raise `ConfigError` if the run cannot be watched."""

    def before_round(self, round: int, arrays: ArrayRecord) -> None:
        """Look at the hypotheses that round `round` is about to train."""

    def in_pause(self, round: int, since: float, ends: float) -> None:
        """Notice that a round waits for nodes, from `since` until `ends` at the latest, in seconds since 1970."""

    def may_stop(self, round: int) -> bool:
        """Return whether `after_evaluate` may end the run after so many rounds.

        If so, clients are not asked to train in the same exchange: their training might have no use.
        """
        return False

    def after_evaluate(self, round: int, metrics: MetricRecord | None) -> str | None:
        """Look at the metrics of the hypotheses after so many rounds; None where no client replied."""

    def after_train(self, round: int, arrays: ArrayRecord, metrics: MetricRecord | None) -> str | None:
        """Look at the hypotheses after a round of training, and at its counts."""

    def after_exchange(self, round: int, stages: dict[str, float]) -> str | None:
        """Look back at an exchange, and the seconds of its stages by name; the last one of a run may only evaluate."""

    def on_stop(self, reason: str) -> None:
        """Notice why the run ends with this round, before its last one."""

    def at_end(self) -> None:
        """Look at the finished run."""

    def on_error(self, error: BaseException) -> None:
        """Notice what ends the run before it is finished; it is raised afterwards."""


class Stop(Callback):
    """Ends a run by what clients report: override `after_evaluate`, and `may_stop` where it need not look."""

    def may_stop(self, round: int) -> bool:
        """Return whether `after_evaluate` may end the run; true unless a class knows better."""
        return True


@dataclass
class Rounds:
    """The rounds of one run, and what came of them so far. The fields are parameters of `HypothesisStrategy.start`."""

    strategy: HypothesisStrategy
    grid: Grid
    result: Result
    timeout: float
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateFn | None
    callbacks: Sequence[Callback]
    stopped: bool = False
    heard: bool | None = None
    """Whether any client has replied to an evaluation; None before the first."""

    @property
    def logs(self) -> bool:
        """Whether the loop tells the log about the rounds, since no callback does."""
        return not any(callback.logs for callback in self.callbacks)

    def run(self, first_round: int, num_rounds: int, evaluate_every: int) -> Result:
        """Run rounds until all are done, no client may train any more, or a callback ends them."""
        try:
            self._run(first_round, num_rounds, evaluate_every)
        except BaseException as error:
            for callback in self.callbacks:
                callback.on_error(error)
            raise
        return self.result

    def _run(self, first_round: int, num_rounds: int, evaluate_every: int) -> None:
        for callback in self.callbacks:
            callback.begin()
        if self.logs:
            self.strategy.summary()
        while first_round <= num_rounds and not (self.stopped or self.strategy.nodes.used_up):
            self.exchange(first_round, train=True, evaluate=(first_round - 1) % evaluate_every == 0)
            first_round += 1
        if self.stopped:
            self.evaluate_here(first_round - 1)
        else:  # the hypotheses from the last training round have not been evaluated yet
            self.exchange(first_round, train=False, evaluate=self.heard is not False)
        self._tell(lambda callback: callback.at_end())

    def exchange(self, number: int, train: bool, evaluate: bool) -> None:
        """Evaluate the hypotheses before round `number`, and train it."""
        strategy, result, clock = self.strategy, self.result, _Clock()
        arrays, before = result.arrays, number - 1
        if train:
            for callback in self.callbacks:
                callback.before_round(number, arrays)
        self.evaluate_here(before)
        strategy.starts_from(arrays)
        may_stop = any(callback.may_stop(before) for callback in self.callbacks)
        alone = train and evaluate and strategy.validates_alone and (may_stop or not strategy.merges)
        kinds = [MessageType.TRAIN] * (train and not alone) + [MessageType.EVALUATE] * evaluate
        asked, to_train, to_evaluate = self._send(number, clock, kinds)
        happened = train
        if evaluate:
            metrics = strategy.aggregate_evaluate(before, to_evaluate)
            clock.ends("validation")
            # A class that overrides `aggregate_evaluate` may well return nothing.
            self.heard = bool(self.heard) or metrics is not None or not strategy.merges
            if metrics is not None:
                self._log("evaluation after round %d: %s", before, metrics)
                result.evaluate_metrics_clientapp[before] = metrics
            if metrics is not None or MessageType.EVALUATE in asked:
                happened = True
                self._tell(lambda callback: callback.after_evaluate(before, metrics), train)
        if train and alone and not self.stopped:
            _, to_train, _ = self._send(number, clock, [MessageType.TRAIN])
        if train and not (alone and self.stopped):
            following, counts = strategy.aggregate_train(number, to_train)
            result.arrays = arrays if following is None else following
            if counts is not None:
                self._log("round %d: %s", number, counts)
                result.train_metrics_clientapp[number] = counts
            self._tell(lambda callback: callback.after_train(number, result.arrays, counts), train)
        clock.ends("aggregation")
        if happened:
            self._tell(lambda callback: callback.after_exchange(number, clock.stages), train)

    def evaluate_here(self, after: int) -> None:
        """Evaluate the hypotheses after so many rounds at the server, if it can."""
        if self.evaluate_fn and (metrics := self.evaluate_fn(after, self.result.arrays)) is not None:
            self._log("evaluation at the server after round %d: %s", after, metrics)
            self.result.evaluate_metrics_serverapp[after] = metrics

    def _send(self, number: int, clock: _Clock, kinds: Sequence[str]) -> tuple[set[str], list[Message], list[Message]]:
        """Ask clients of each of these kinds; return the types of messages, and replies for training and evaluation.

        If no node answers, the messages are made and sent again, once nodes can be asked again.
        """
        strategy, nodes = self.strategy, self.strategy.nodes
        while kinds:
            nodes.wait(number, self.grid, partial(self._in_pause, number))
            clock.ends("pause")
            messages: list[Message] = []
            for kind in kinds:
                train = kind == MessageType.TRAIN
                configure = strategy.configure_train if train else strategy.configure_evaluate
                config = self.train_config if train else self.evaluate_config
                made = list(configure(number if train else number - 1, self.result.arrays, config, self.grid))
                strategy.asked[kind] = nodes.asked(made, strategy.asked[kind])
                messages += made
            replies = nodes.exchange(number, self.grid, messages, self.timeout)
            clock.ends("sites")
            if not nodes.unanswered:
                return {message.metadata.message_type for message in messages}, *replies
        return set(), [], []

    def _log(self, text: str, *what: object) -> None:
        if self.logs:
            log(INFO, text, *what)

    def _in_pause(self, number: int, since: float, ends: float) -> None:
        for callback in self.callbacks:
            callback.in_pause(number, since, ends)

    def _tell(self, tell: Callable[[Callback], str | None], may_stop: bool = False) -> None:
        """Call each callback, then raise the first error: one that saves the round may come after one that fails.

        Clients have paid for the round, and would pay again if it had to be repeated.
        """
        errors = []
        for callback in self.callbacks:
            try:
                reason = tell(callback)
            except Exception as error:
                errors.append(error)
                continue
            if reason and may_stop and not self.stopped:
                self.stopped = True
                self._log("the run ends: %s", reason)
                for other in self.callbacks:
                    other.on_stop(reason)
        if errors:
            raise errors[0]


class _Clock:
    """The seconds of an exchange's stages."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._last = time.perf_counter()

    def ends(self, stage: str) -> None:
        """Count the seconds since the end of another stage."""
        now = time.perf_counter()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._last
        self._last = now
