"""The rounds of a run: train, evaluate, keep the best, until all are done or an observer stops it.

The strategy (`umbel.strategies.base`) says what to ask and makes the next hypotheses of the replies.
`umbel.nodes.fleet` samples the clients, and sends and reads the messages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from logging import WARNING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from umbel.models.model import Model
from umbel.nodes.exchange import Exchange
from umbel.nodes.transport import transport_of
from umbel.protocol import logs
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.flower import log
from umbel.protocol.records import to_array_record
from umbel.protocol.words import count_of
from umbel.server.history import Round, State
from umbel.server.observer import Observer, Run
from umbel.server.setup import Setup

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
    messages: list[Message] = []
    for r, hypotheses in enumerate(sets):
        messages += setup.fleet.ask_evaluation(
            0, to_array_record(hypotheses), setup.task(name).evaluation, grid, f"restart-{r}"
        )
    # A node without a reply must not delay the start longer than a round.
    needed = run.quorum * len(messages) if run.quorum < 1 else math.inf
    answers = Exchange(transport_of(grid)).run(messages, run.round_timeout, lambda there: len(there) >= needed)
    replies = [answer.reply for answer in answers]
    losses = []
    for r in range(len(sets)):
        scores = setup.fleet.scores(reply for reply in replies if reply.metadata.group_id == f"restart-{r}")
        losses.append(scores.loss if scores else math.inf)
    return sets[int(np.argmin(losses))]


def run_rounds(run: Run) -> None:
    """Run rounds until they are over or an observer stops the run; `run.state` holds the outcome.

    A round sends training from theta(t) and evaluation of theta(t) in one message a node, so that it
    costs one wait. Where `patience` may end the run, the evaluation goes alone, and training follows if the run
    continues: clients are not charged for training that has no use.
    """
    rounds, state = run.setup.config.rounds, run.state
    for observer in run.observers:
        observer.begin(run)
    arrays, task = run.fleet.record(state.hypotheses), run.setup.task(run.name).to_record()
    for number in range(len(state.history) + 1, rounds + 1):
        logs.about(round=number)
        if run.fleet.used_up:
            most = run.setup.config.max_participations
            done = f"every client has reached max-participations = {most}"
            break
        for observer in run.observers:
            observer.before_round(run, number)
        arrays = _run_round(run, number, arrays, task, train=True)
        _tell(run.observers, lambda observer: observer.after_round(run))
        if state.stopped:
            break
    else:
        done = f"all {rounds} rounds done" if rounds > 1 else "its only round is done"
    if not state.stopped:
        state.stopped = done
        # The hypotheses from the last training round have not been evaluated yet.
        if state.best_round:
            _run_round(run, len(state.history) + 1, arrays, task, train=False)
            _tell(run.observers, lambda observer: observer.after_round(run))
    _tell(run.observers, lambda observer: observer.at_end(run))


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


def _run_round(run: Run, number: int, arrays: ArrayRecord, task: ConfigRecord, train: bool) -> ArrayRecord:
    """Do a round from the hypotheses in `arrays`; return those of the next.

    It does not train after a validation that exhausts the run's patience, unless both had to be asked together.
    """
    clock = _Clock()
    setup, state, strategy = run.setup, run.state, run.strategy
    fleet, k, patience = run.fleet, len(next(iter(state.hypotheses.values()))), run.setup.config.patience
    nearest = distances(flatten(state.hypotheses)) if k > 1 else []
    validates = not train or (number - 1) % setup.config.validate_every == 0
    training = partial(strategy.configure_train, number, arrays, task, run.grid)
    evaluation = partial(strategy.configure_evaluate, number, arrays, task, run.grid)
    alone = train and validates and 0 < patience <= state.stale + 1 and strategy.validates_alone
    first = [training] * (train and not alone) + [evaluation] * validates
    asked, replies = _exchange(run, number, clock, first)
    dropped = 0

    scores = strategy.validate(number, replies) if validates else None
    if scores is not None:
        _keep_best(state, scores.loss, number)
        if train and 0 < patience <= state.stale:
            state.stopped = f"no better hypotheses in {count_of(patience, 'validation')}"
            train = not alone
    elif any(message.metadata.message_type == "evaluate" for message in asked):
        log(
            WARNING, "round %d: no validation client reported; their sites refuse, or their budgets are used up", number
        )
    clock.ends("validation")
    if train and alone:
        dropped = fleet.dropped
        _, replies = _exchange(run, number, clock, [training])
    run.outcome = outcome = strategy.train(number, replies) if train else None
    following = outcome.following if outcome else None
    if following is not None:
        before, state.hypotheses, arrays = state.hypotheses, following, fleet.record(following)
        if len(next(iter(following.values()))) != len(next(iter(before.values()))):
            # More hypotheses fit the scored rows better, so losses of different numbers are not compared.
            state.best_loss, state.stale = math.inf, 0
    if not state.best_round:
        state.best = state.hypotheses  # no validation: use the latest hypotheses
    spent = fleet.participations
    clock.ends("aggregation")
    state.history.append(
        Round(
            number=number,
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
            seconds=round(sum(clock.stages.values()), 3),
            dropped=dropped + fleet.dropped,
            loss_spread=scores.loss_spread if scores else [],
            metric_spread=scores.metric_spread if scores else [],
            exact_reports=scores.exact if scores else 0,
            report_noise=scores.noise if scores else 0.0,
            report_bound=scores.bound if scores else 0.0,
            ratio=ratios(outcome.longest, nearest) if outcome and outcome.longest is not None else [],
            stages={stage: round(seconds, 3) for stage, seconds in clock.stages.items()},
        )
    )
    return arrays


def _exchange(
    run: Run, number: int, clock: _Clock, parts: Sequence[Callable[[], Iterable[Message]]]
) -> tuple[list[Message], list[Message]]:
    """Send the messages that each of `parts` makes, and return them and the replies.

    If no node answers, the messages are made and sent again, once nodes can be asked again.
    """
    fleet, grid = run.fleet, run.grid
    while True:
        fleet.wait(number, grid, partial(_in_pause, run, number))
        clock.ends("pause")
        messages = [message for part in parts for message in part()]
        replies = fleet.exchange(number, grid, messages, run.setup.config.round_timeout)
        clock.ends("sites")
        if not (fleet.unanswered and fleet.waits(grid)):
            return messages, replies


class _Clock:
    """The seconds of a round's stages."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._last = time.perf_counter()

    def ends(self, stage: str) -> None:
        """Count the seconds since the end of another stage."""
        now = time.perf_counter()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._last
        self._last = now


def _in_pause(run: Run, number: int, since: float, ends: float) -> None:
    for observer in run.observers:
        observer.in_pause(run, number, since, ends)


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


def _median(spent: NDArray[np.int64]) -> float:
    """Return the median, at once where most clients of a large dataset have never released."""
    if 2 * np.count_nonzero(spent) < len(spent):
        return 0.0
    upto = np.cumsum(np.bincount(spent))  # whole numbers, and few different ones
    return float(upto.searchsorted([(len(spent) - 1) // 2, len(spent) // 2], side="right").mean())


def _keep_best(state: State, loss: float, number: int) -> None:
    """Keep the hypotheses that were just evaluated if they are the best so far."""
    if loss < state.best_loss:
        state.best, state.best_loss, state.best_round, state.stale = state.hypotheses, loss, number, 0
    else:
        state.stale += 1
