"""The rounds of a run: train, evaluate, keep the best, until all are done or an observer stops it.

The strategy (`umbel.strategies.base`) says what to ask and makes the next hypotheses of the replies.
`umbel.nodes.fleet` draws the clients, and sends and reads the messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from logging import WARNING
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from umbel.models.model import Model
from umbel.nodes.exchange import Exchange
from umbel.nodes.reading import Asked
from umbel.nodes.transport import transport_of
from umbel.protocol import logs
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.errors import FleetError
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.log import log
from umbel.protocol.releases import Scores
from umbel.protocol.words import count_of
from umbel.server.history import Round
from umbel.server.observer import Observer, Run
from umbel.server.setup import Setup
from umbel.strategies.base import Outcome
from umbel.strategies.rounds import Stop

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
    return {name: np.stack([one[name] for one in drawn]) for name in drawn[0]}


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
    for one in sets:
        for name, value in first.items():
            one[name][:known] = value
    if len(sets) == 1:
        return sets[0]
    asked: list[Asked] = []
    for r, hypotheses in enumerate(sets):
        task = setup.task(name).evaluation
        asked.append(setup.fleet.ask_evaluation(0, Hypotheses(hypotheses), task, grid, f"restart-{r}"))
    messages = [message for one in asked for message in one.messages]
    # A node without a reply must not delay the start longer than a round.
    needed = run.quorum * len(messages) if run.quorum < 1 else math.inf
    answers = Exchange(transport_of(grid)).run(messages, run.round_timeout, lambda there: len(there) >= needed)
    replies = [answer.reply for answer in answers]
    losses = []
    for r in range(len(sets)):
        mine = [reply for reply in replies if reply.metadata.group_id == f"restart-{r}"]
        scores = setup.fleet.scores(asked[r], mine)
        losses.append(scores.loss if scores else math.inf)
    if messages and losses == [math.inf] * len(sets):
        raise FleetError(
            f"{len(messages)} messages asked for scores of {len(sets)} first sets, and none got a usable reply; the "
            "sites' logs say why, and restarts=1 begins without scores",
            code="nodes.no-scores",
        )
    return sets[int(np.argmin(losses))]


def run_rounds(run: Run) -> None:
    """Run rounds until they are over or an observer stops the run; `run.state` holds the outcome.

    Where `patience` may end the run, evaluation goes alone, and training follows if the run continues: clients are not
    charged for training that has no use.
    """
    config, state, task = run.setup.config, run.state, run.setup.task(run.name)
    for observer in run.observers:
        observer.begin(run)
    run.strategy.start(
        run.grid,
        run.fleet.record(state.hypotheses),
        config.rounds,
        config.round_timeout,
        task.to_record(),
        task.evaluation.to_record(),
        first_round=len(state.history) + 1,
        evaluate_every=config.validate_every,
        callbacks=[_Rounds(run)],
        nodes=run.fleet,
    )
    if not state.stopped:
        state.stopped = _done(run)
    _tell(run.observers, lambda observer: observer.at_end(run))


def _done(run: Run) -> str:
    """Return why the run's rounds are over, if nothing stopped them."""
    rounds, most = run.setup.config.rounds, run.setup.config.max_participations
    if run.fleet.used_up and sum(entry.asked > 0 for entry in run.state.history) < rounds:
        return f"every client has reached max-participations = {most}"
    return f"all {rounds} rounds done" if rounds > 1 else "its only round is done"


def _tell(observers: Iterable[Observer], tell: Callable[[Observer], None]) -> None:
    """Tell each observer, then raise the first error: the observer that saves a round may come after one that fails.

    Clients have paid for the round, and would pay again if it had to be repeated.
    """
    errors = []
    for observer in observers:
        try:
            tell(observer)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


class _Rounds(Stop):
    """Keeps the state of a run from round to round, tells its observers, and ends it where patience is exhausted."""

    logs = True

    def __init__(self, run: Run) -> None:
        self.run = run
        self._begun: ArrayRecord | None = None  # what the exchange is to train
        self._evaluated = False
        self._scores: Scores | None = None
        self._outcome: Outcome | None = None

    def before_round(self, round: int, arrays: ArrayRecord) -> None:
        """Tell the observers."""
        self._begun = arrays
        logs.about(round=round)
        for observer in self.run.observers:
            observer.before_round(self.run, round)

    def in_pause(self, round: int, since: float, ends: float) -> None:
        """Tell the observers."""
        for observer in self.run.observers:
            observer.in_pause(self.run, round, since, ends)

    def may_stop(self, round: int) -> bool:
        """Return whether one more validation without better hypotheses exhausts the run's patience."""
        return 0 < self.run.setup.config.patience <= self.run.state.stale + 1

    def after_evaluate(self, round: int, metrics: MetricRecord | None) -> str | None:
        """Keep the hypotheses if they are the best so far."""
        state, patience = self.run.state, self.run.setup.config.patience
        self._evaluated = True
        self._scores = None if metrics is None else _scores_in(metrics)
        if self._scores is not None:
            if self._scores.loss < state.best_loss:
                state.best, state.best_loss, state.stale = state.hypotheses, self._scores.loss, 0
                state.best_round = round + 1
            else:
                state.stale += 1
            if self._begun is not None and 0 < patience <= state.stale:
                state.stopped = f"no better hypotheses in {count_of(patience, 'validation')}"
        else:
            text = "round %d: no validation client reported; their sites refuse, or their budgets are used up"
            log(WARNING, text, round + 1)
        return state.stopped

    def after_train(self, round: int, arrays: ArrayRecord, metrics: MetricRecord | None) -> None:
        """Take the round's outcome from the strategy; of one that keeps none, from what it returned."""
        known, counts = self.run.strategy.history, cast(dict[str, Any], metrics or {})
        following = None if arrays is self._begun else self.run.strategy.opened(arrays)
        if known and known[-1].round == round:
            self._outcome = replace(known[-1], following=following)
            return
        nobody, groups = np.zeros(0, np.int64), np.asarray(counts.get("groups", ()), np.int64)
        asked, lost = (int(counts.get(name, 0)) for name in ("asked", "lost-nodes"))
        self._outcome = Outcome(round, nobody, nobody, groups, None, asked, lost, following)

    def after_exchange(self, round: int, stages: dict[str, float]) -> str | None:
        """Add the round to the history, and tell the observers."""
        run, state, scores, outcome = self.run, self.run.state, self._scores, self._outcome
        happened = outcome is not None or self._evaluated
        if self._begun is None:
            state.stopped = state.stopped or _done(run)
        self._begun, self._evaluated, self._scores, self._outcome = None, False, None, None
        if not happened:
            return state.stopped
        before = state.hypotheses
        nearest = distances(flatten(before)) if len(next(iter(before.values()))) > 1 else []
        following = outcome.following if outcome else None
        if following is not None:
            state.hypotheses = following
            if len(next(iter(following.values()))) != len(next(iter(before.values()))):
                # More hypotheses fit the scored rows better, so losses of different numbers are not compared.
                state.best_loss, state.stale = math.inf, 0
        if not state.best_round:
            state.best = state.hypotheses  # no validation: use the latest hypotheses
        run.outcome = outcome
        spent = run.fleet.participations
        state.history.append(
            Round(
                number=round,
                loss=scores.loss if scores else None,
                metric=scores.metric if scores else None,
                asked=outcome.asked if outcome else 0,
                releases=len(outcome.clients) if outcome else 0,
                lost_nodes=outcome.lost_nodes if outcome else 0,
                groups=outcome.counts.tolist() if outcome else [],
                nearest=nearest,
                moved=following is not None,
                best_round=state.best_round,
                median_participations=_median(spent),
                max_participations=int(spent.max()),
                seconds=_rounded(sum(stages.values())),
                dropped=run.fleet.dropped,
                loss_spread=scores.loss_spread if scores else [],
                metric_spread=scores.metric_spread if scores else [],
                exact_reports=scores.exact if scores else 0,
                report_noise=scores.noise if scores else 0.0,
                report_bound=scores.bound if scores else 0.0,
                ratio=ratios(outcome.longest, nearest) if outcome and outcome.longest is not None else [],
                stages={stage: _rounded(seconds) for stage, seconds in stages.items()},
            )
        )
        _tell(run.observers, lambda observer: observer.after_round(run))
        return state.stopped


def distances(hypotheses: NDArray[np.float64]) -> list[float]:
    """Return the distance from each of the hypotheses (k, n) to the nearest other one."""
    if len(hypotheses) == 1:
        return []
    between = np.sqrt([np.square(hypotheses - one).sum(axis=1) for one in hypotheses])
    np.fill_diagonal(between, np.inf)
    nearest: list[float] = between.min(axis=1).tolist()
    return nearest


def ratios(longest: NDArray[np.float64], nearest: Sequence[float]) -> list[float]:
    """Return the longest update of each hypothesis as a part of its distance to the nearest other one."""
    if not nearest:
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        found: list[float] = np.where(longest > 0, longest / np.asarray(nearest), 0.0).tolist()
    return found


def _scores_in(metrics: Mapping[str, Any]) -> Scores:
    """Return the scores in the metrics of a strategy, which may have others besides."""
    return Scores(**{entry.name: metrics[entry.name] for entry in fields(Scores) if entry.name in metrics})


def _rounded(seconds: float) -> float:
    return round(seconds, 3)


def _median(spent: NDArray[np.int64]) -> float:
    """Return the median, at once where most clients of a large dataset have never released."""
    if 2 * np.count_nonzero(spent) < len(spent):
        return 0.0
    upto = np.cumsum(np.bincount(spent))  # whole numbers, and few different ones
    return float(upto.searchsorted([(len(spent) - 1) // 2, len(spent) // 2], side="right").mean())
