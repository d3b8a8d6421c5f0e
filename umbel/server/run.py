"""A run in progress: its first hypotheses, and the callback that keeps its state and its best hypotheses.

The loop of its rounds is in `umbel.strategies.rounds`. The strategy (`umbel.strategies.base`) says what to ask and
makes the next hypotheses of the replies. `umbel.nodes.fleet` draws the clients, and sends and reads the messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from logging import WARNING
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from umbel.models.model import Model
from umbel.nodes.exchange import Exchange
from umbel.nodes.fleet import Fleet
from umbel.nodes.roster import Roster
from umbel.nodes.transport import transport_of
from umbel.protocol import logs
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.asked import Asked
from umbel.protocol.errors import FleetError
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.log import log
from umbel.protocol.releases import Scores
from umbel.protocol.words import count_of
from umbel.server.history import Round, State, distances
from umbel.server.run_folder import RunFolder, number_of
from umbel.server.setup import Setup
from umbel.strategies import Callback, HypothesisStrategy
from umbel.strategies.base import Outcome

_INITIAL = 3  # separates the draws of initial hypotheses from the strategy's sampling


def draw_hypotheses(model: Model, k: int, seed: int, restart: int) -> Arrays:
    """Draw k initial hypotheses, each (k, \\*shape).

    A single hypothesis of a linear model begins at 0: random parameters would have to be unlearnt first, by clipped and
    noisy updates. Several hypotheses must differ.
    """
    seeds = [
        int(np.random.SeedSequence([seed, _INITIAL, restart, j]).generate_state(1, np.uint64)[0]) for j in range(k)
    ]
    drawn = [model.initial(seed) for seed in seeds]
    if k == 1 and model.linear:
        return {name: np.zeros_like(value[None]) for name, value in drawn[0].items()}
    return {name: np.stack([hypothesis[name] for hypothesis in drawn]) for name in drawn[0]}


def initial_hypotheses(setup: Setup, grid: Grid, name: str = "") -> Arrays:
    """Return the best of `RunConfig.restarts` random sets of hypotheses, scored by validation clients.

    k-means from k random hypotheses now and then ends with all clients in one cluster; starting
    from the best of several sets makes that rare. In each set, the hypotheses of a run to start from take the
    place of the first ones.
    """
    strategy, run, first = setup.strategy, setup.config, setup.first
    k, known = strategy.first_hypotheses, len(next(iter(first.values()), ()))
    restarts = run.restarts if known < k else 1
    sets = [draw_hypotheses(setup.model, k, run.seed, r) for r in range(restarts)]
    for hypotheses in sets:
        for name, value in first.items():
            hypotheses[name][:known] = value
    if len(sets) == 1:
        return sets[0]
    asked: list[Asked] = []
    for r, hypotheses in enumerate(sets):
        task = setup.task(name).evaluation
        asked.append(setup.fleet.ask_evaluation(0, Hypotheses(hypotheses), task, grid, group=f"restart-{r}"))
    messages = [message for one in asked for message in one.messages]
    # A node without a reply must not delay the start longer than a round.
    needed = run.quorum * len(messages) if run.quorum < 1 else math.inf
    answers = Exchange(transport_of(grid)).run(messages, run.round_timeout, lambda there: len(there) >= needed)
    replies = [answer.reply for answer in answers]
    losses = []
    for r in range(len(sets)):
        mine = [reply for reply in replies if reply.metadata.group_id == f"restart-{r}"]
        scores = setup.fleet.read(asked[r], mine)
        losses.append(scores.loss if scores else math.inf)
    if messages and losses == [math.inf] * len(sets):
        raise FleetError(
            f"{len(messages)} messages asked for scores of {len(sets)} first sets, and none got a usable reply; the "
            "sites' logs say why, and restarts=1 begins without scores",
            code="nodes.no-scores",
        )
    return sets[int(np.argmin(losses))]


@dataclass
class Run(Callback):
    """A run in progress: it keeps its state from round to round, and ends where patience is exhausted.

    It is the first of the run's callbacks, so that the others find the finished round in its state.
    """

    setup: Setup
    grid: Grid
    state: State
    callbacks: Sequence[Callback] = ()  # each has the run as its `run`
    name: str = ""  # the same after the run resumes
    folder: RunFolder | None = None
    outcome: Outcome | None = None  # of the last round; None if it only validated
    complete: Sequence[Round] = ()  # rounds since the last exchange of which nothing more will be known
    _begun: ArrayRecord | None = field(default=None, init=False)  # the hypotheses that the exchange is to train
    _told: int = field(default=0, init=False)  # rounds that were complete before
    logs = True

    def __post_init__(self) -> None:
        for callback in self.callbacks:
            callback.run = self
        self._told = len(self.state.history) - 1

    @property
    def fleet(self) -> Fleet:
        """The clients."""
        return self.setup.fleet

    @property
    def roster(self) -> Roster:
        """The nodes, and the clients that each hosts."""
        return self.fleet.roster(self.grid)

    @property
    def strategy(self) -> HypothesisStrategy:
        """The strategy."""
        return self.setup.strategy

    def do(self) -> None:
        """Do the rounds until they are over or a callback stops them; `state` holds the outcome.

        Where `patience` may end the run, evaluation goes alone, and training follows if the run continues: clients are
        not charged for training that has no use.
        """
        config, state, task = self.setup.config, self.state, self.setup.task(self.name)
        self.strategy.start(
            self.grid,
            self.fleet.record(state.hypotheses),
            config.rounds,
            config.round_timeout,
            task.to_record(),
            task.evaluation.to_record(),
            first_round=len(state.history),
            evaluate_every=config.validation.every,
            callbacks=[self, *self.callbacks],
            nodes=self.fleet,
        )

    def before_round(self, round: int, arrays: ArrayRecord) -> None:
        """Note the hypotheses, and name the round in the log."""
        self._begun, self.outcome = arrays, None
        logs.about(round=round)

    def may_stop(self, round: int) -> bool:
        """Return whether one more validation without better hypotheses exhausts the run's patience."""
        return 0 < self.setup.config.patience <= self.state.stale + 1

    def after_evaluate(self, round: int, metrics: MetricRecord | None) -> str | None:
        """Keep the hypotheses if they are the best so far."""
        state, patience = self.state, self.setup.config.patience
        if metrics is None:
            log(WARNING, "round %d: no validation client reported; sites refuse, or their budgets are used up", round)
            return None
        # A strategy may have other metrics besides.
        known: dict[str, Any] = {each.name: metrics[each.name] for each in fields(Scores) if each.name in metrics}
        scores = Scores(**known)
        state.stale += state.history[-1].loss is None  # a resumed run may repeat its last validation
        if scores.loss < state.best_loss:
            state.best, state.best_loss, state.best_round, state.stale = state.hypotheses, scores.loss, round, 0
        state.history[-1] = replace(
            state.history[-1], loss=scores.loss, metric=scores.metric, loss_spread=scores.loss_spread,
            metric_spread=scores.metric_spread, exact_reports=scores.exact, report_noise=scores.noise,
            report_bound=scores.bound, best_round=state.best_round,
        )  # fmt: skip
        return f"no better hypotheses in {count_of(patience, 'validation')}" if 0 < patience <= state.stale else None

    def after_train(self, round: int, arrays: ArrayRecord, metrics: MetricRecord | None) -> None:
        """Take the round's outcome from the strategy; of one that keeps none, from what it returned."""
        known, counts = self.strategy.history, cast(dict[str, Any], metrics or {})
        following = None if arrays is self._begun else self.strategy.read_hypotheses(arrays)
        if known and known[-1].round == round:
            self.outcome = replace(known[-1], following=following)
            return
        nobody, groups = np.zeros(0, np.int64), np.asarray(counts.get("groups", ()), np.int64)
        asked, lost = (int(counts.get(name, 0)) for name in ("asked", "lost-nodes"))
        self.outcome = Outcome(round, nobody, nobody, groups, None, asked, lost, following)

    def after_exchange(self, round: int, stages: dict[str, float]) -> None:
        """Add the round that was trained to the history."""
        state, outcome, spent = self.state, self.outcome, self.fleet.participations
        if self._begun is None:
            state.stopped, self.outcome = self._why_over, None
        elif outcome is not None:
            before = nearest = state.history[-1].nearest
            if (following := outcome.following) is not None:
                if number_of(following) != number_of(state.hypotheses):
                    # More hypotheses fit the scored rows better, so losses of different numbers are not compared.
                    state.best_loss, state.stale = math.inf, 0
                state.hypotheses, nearest = following, distances(flatten(following))
            if state.best_loss == math.inf:
                state.best, state.best_round = state.hypotheses, round
            state.history.append(Round(
                number=round, asked=outcome.asked, releases=len(outcome.clients), lost_nodes=outcome.lost_nodes,
                groups=outcome.counts.tolist(), nearest=nearest, moved=following is not None,
                best_round=state.best_round, median_participations=_median(spent), max_participations=int(spent.max()),
                seconds=_rounded(sum(stages.values())), dropped=self.fleet.dropped,
                ratio=ratios(outcome.longest, before),
                stages={stage: _rounded(seconds) for stage, seconds in stages.items()},
            ))  # fmt: skip
        self._begun = None
        self._note_complete()

    def _note_complete(self) -> None:
        """Note which rounds are complete now: where validation is due, the next exchange completes the last one."""
        last, run = self.state.history[-1].number, self.setup.config
        due = self.roster.validation and (last % run.validation.every == 0 or last >= run.rounds or self.fleet.used_up)
        upto = last + bool(self.state.stopped or not due)
        self.complete, self._told = self.state.history[self._told : upto], upto

    def on_stop(self, reason: str) -> None:
        """Keep the reason."""
        self.state.stopped = reason

    def at_end(self) -> None:
        """Say why the run is over, unless something stopped it."""
        self.state.stopped = self.state.stopped or self._why_over
        self._note_complete()

    @property
    def _why_over(self) -> str:
        rounds, most = self.setup.config.rounds, self.setup.config.max_participations
        if self.fleet.used_up and sum(entry.asked > 0 for entry in self.state.history) < rounds:
            return f"every client has reached max-participations = {most}"
        return f"all {rounds} rounds done" if rounds > 1 else "its only round is done"


def ratios(longest: NDArray[np.float64] | None, nearest: Sequence[float]) -> list[float]:
    """Return the longest update of each hypothesis as a part of its distance to the nearest other one; none if the
    updates are unknown."""
    if longest is None or not nearest:
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        parts: list[float] = np.where(longest > 0, longest / np.asarray(nearest), 0.0).tolist()
    return parts


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


def _median(spent: NDArray[np.int64]) -> float:
    """Return the median, at once where most clients of a large dataset have never released."""
    if 2 * np.count_nonzero(spent) < len(spent):
        return 0.0
    upto = np.cumsum(np.bincount(spent))  # whole numbers, and few different ones
    return float(upto.searchsorted([(len(spent) - 1) // 2, len(spent) // 2], side="right").mean())
