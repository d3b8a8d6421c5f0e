"""The rounds of a run: train, evaluate, keep the best, stop when nothing gets better."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from attacks.leak_meter import Leak
from fleet.exchange import Exchange
from models.base import Model
from protocol.arrays import Arrays, flatten
from protocol.records import from_array_record, to_array_record
from server.settings import Settings

_KINDS = ("train", "evaluate")
_INITIAL = 3  # keeps the draws of initial hypotheses apart from the strategy's sampling


@dataclass(frozen=True)
class Round:
    """What came out of a round.

    Attributes
    ----------
    number : int
        From 1. The last entry of a run evaluates what its last training round left.
    loss, metric : float or None
        Of the hypotheses that the round started from, over the validation clients that answered.
    asked, releases, lost_nodes : int
        Clients asked to train, clients that released, nodes that did not answer.
    groups : list of int
        Releases that went to each hypothesis.
    nearest : list of float
        Distance from each hypothesis that the round started from to the nearest other one; empty for k = 1.
    moved : bool
        Whether there were releases enough to move the hypotheses.
    best_round : int
        The round whose starting hypotheses had the lowest loss so far.
    median_participations, max_participations : float
        Over all training clients, up to this round.
    seconds : float
    dropped : int
        Replies that came late, twice or unasked.
    """

    number: int
    loss: float | None
    metric: float | None
    asked: int
    releases: int
    lost_nodes: int
    groups: list[int]
    nearest: list[float]
    moved: bool
    best_round: int
    median_participations: float
    max_participations: int
    seconds: float
    dropped: int = 0

    @cached_property
    def line(self) -> str:
        """The round in JSON, made once although it is written with every later round."""
        return json.dumps(asdict(self))


@dataclass
class State:
    """Where a run stands; all that is needed to go on with it.

    Attributes
    ----------
    hypotheses : dict of ndarray, each (k, \\*shape)
        What the next round starts from.
    best : dict of ndarray, each (k, \\*shape)
        The hypotheses of lowest validation loss so far, or the newest without validation.
    best_loss : float
    best_round : int
    stale : int
        Validations since the best one.
    history : list of Round
    stopped : str
        Why the run ended; empty while it goes on.
    leaks : list of Leak
        What the leak meter found.
    remarks : list of str
        What the strategy has to say of the run.
    """

    hypotheses: Arrays
    best: Arrays
    best_loss: float = math.inf
    best_round: int = 0
    stale: int = 0
    history: list[Round] = field(default_factory=list)
    stopped: str = ""
    leaks: list[Leak] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def draw_hypotheses(model: Model, k: int, seed: int, restart: int) -> Arrays:
    """Draw k initial hypotheses, each (k, \\*shape)."""
    seeds = [
        int(np.random.SeedSequence([seed, _INITIAL, restart, j]).generate_state(1, np.uint64)[0]) for j in range(k)
    ]
    drawn = [model.initial(seed) for seed in seeds]
    return {name: np.stack([one[name] for one in drawn]) for name in drawn[0]}


def initial_hypotheses(settings: Settings, grid: Grid) -> Arrays:
    """Return the best of `Settings.restarts` random sets of hypotheses, scored by validation clients.

    k-means from k random hypotheses now and then ends with all clients in one cluster; starting
    from the best of several sets makes that rare.
    """
    strategy = settings.strategy
    sets = [draw_hypotheses(settings.model, strategy.hypotheses, settings.seed, r) for r in range(settings.restarts)]
    if len(sets) == 1:
        return sets[0]
    messages: list[Message] = []
    for r, hypotheses in enumerate(sets):
        asked = strategy.configure_evaluate(0, to_array_record(hypotheses), ConfigRecord(), grid)
        for message in asked:
            message.metadata.group_id = f"restart-{r}"
        messages += asked
    replies = [answer.reply for answer in Exchange().run(grid, messages, settings.round_timeout)]
    losses = []
    for r in range(len(sets)):
        own = [reply for reply in replies if reply.metadata.group_id == f"restart-{r}"]
        scores = strategy.aggregate_evaluate(0, own)
        losses.append(float(scores["loss"]) if scores else math.inf)  # type: ignore[arg-type]
    return sets[int(np.argmin(losses))]


def run_rounds(settings: Settings, grid: Grid, state: State, after_round: Callable[[State], None]) -> None:
    """Run rounds until they are over or nothing gets better; `state` holds the outcome.

    Each round sends training from theta(t) and evaluation of theta(t) in one exchange, so that
    it costs one wait.

    Parameters
    ----------
    settings : Settings
    grid : Grid
    state : State
        Changed in place.
    after_round : callable
        Called with the state after each round, to report and save it.
    """
    state.remarks = settings.strategy.remarks
    arrays = to_array_record(state.hypotheses)
    for number in range(len(state.history) + 1, settings.rounds + 1):
        arrays = _run_round(settings, grid, state, number, arrays, train=True)
        over = bool(settings.strategy.finished) or _out_of_patience(settings, state)
        if over:
            state.stopped = reason(settings, state)
        after_round(state)
        if over:
            return
    state.stopped = reason(settings, state)
    # What the last round of training left has not been evaluated yet.
    if state.best_round:
        _run_round(settings, grid, state, settings.rounds + 1, arrays, train=False)
        after_round(state)


def reason(settings: Settings, state: State) -> str:
    """Return why a run is over, or that it is not."""
    if settings.strategy.finished:
        return settings.strategy.finished
    if _out_of_patience(settings, state):
        return f"no better hypotheses in {settings.patience} validations"
    trained = sum(1 for entry in state.history if entry.asked)
    return f"all {settings.rounds} rounds done" if trained >= settings.rounds else "it was interrupted"


def _out_of_patience(settings: Settings, state: State) -> bool:
    return 0 < settings.patience <= state.stale


def _run_round(
    settings: Settings, grid: Grid, state: State, number: int, arrays: ArrayRecord, train: bool
) -> ArrayRecord:
    """Do a round from the hypotheses in `arrays`; return those of the next."""
    began = time.perf_counter()
    strategy = settings.strategy
    nearest = distances(flatten(state.hypotheses))
    messages: list[Message] = []
    if train and settings.leak_meter and (leak := settings.leak_meter.look(number, state.hypotheses, grid)):
        state.leaks.append(leak)
    if train:
        messages += strategy.configure_train(number, arrays, settings.train_config, grid)
    validates = not train or (number - 1) % settings.validate_every == 0
    if validates:
        messages += strategy.configure_evaluate(number, arrays, ConfigRecord(), grid)
    replies = strategy.exchange(number, grid, messages, settings.round_timeout)
    by_type = {kind: [reply for reply in replies if reply.metadata.message_type == kind] for kind in _KINDS}

    scores = strategy.aggregate_evaluate(number, by_type["evaluate"]) if validates else None
    if scores is not None:
        _judge(state, float(scores["loss"]), number)  # type: ignore[arg-type]
    following, counts = strategy.aggregate_train(number, by_type["train"]) if train else (None, None)
    if following is not None:
        state.hypotheses = from_array_record(following)
    if not state.best_round:
        state.best = state.hypotheses  # nobody validates, so the newest have to do
    spent = strategy.participations
    state.history.append(
        Round(
            number=number,
            loss=float(scores["loss"]) if scores else None,  # type: ignore[arg-type]
            metric=float(scores["metric"]) if scores else None,  # type: ignore[arg-type]
            asked=int(counts["asked"]) if counts else 0,  # type: ignore[arg-type]
            releases=int(counts["releases"]) if counts else 0,  # type: ignore[arg-type]
            lost_nodes=int(counts["lost-nodes"]) if counts else 0,  # type: ignore[arg-type]
            groups=list(counts["groups"]) if counts else [],  # type: ignore[arg-type]
            nearest=nearest,
            moved=following is not None,
            best_round=state.best_round,
            median_participations=_median(spent),
            max_participations=int(spent.max()),
            seconds=round(time.perf_counter() - began, 3),
            dropped=strategy.dropped,
        )
    )
    return arrays if following is None else following


def distances(hypotheses: NDArray[np.float64]) -> list[float]:
    """Return the distance from each of the hypotheses (k, n) to the nearest other one."""
    if len(hypotheses) == 1:
        return []
    between = np.stack([np.linalg.norm(hypotheses - one, axis=1) for one in hypotheses])
    np.fill_diagonal(between, np.inf)
    nearest: list[float] = between.min(axis=1).tolist()
    return nearest


def _median(spent: NDArray[np.int64]) -> float:
    """Return the median, at once where most clients of a large federation have never released."""
    return float(np.median(spent)) if 2 * np.count_nonzero(spent) >= len(spent) else 0.0


def _judge(state: State, loss: float, number: int) -> None:
    """Keep the hypotheses that were just evaluated if they are the best so far."""
    if loss < state.best_loss:
        state.best, state.best_loss, state.best_round, state.stale = state.hypotheses, loss, number, 0
    else:
        state.stale += 1
