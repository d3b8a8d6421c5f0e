"""The rounds of a run, played with a strategy whose every number is written down beforehand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import models
from protocol.arrays import Arrays, flatten
from protocol.messages import CONFIG, COUNTS, HYPOTHESES, Hosting, evaluate_reply
from protocol.records import from_array_record, to_array_record
from server.rounds import Round, State, _median, distances, draw_hypotheses, initial_hypotheses, run_rounds
from server.settings import Settings
from simulation.grid import InProcessGrid
from strategies import GroupPrivacy
from strategies.base import HypothesisStrategy

LINEAR = models.load("linear")


def theta(value: float) -> Arrays:
    """Two hypotheses of which every number is the same."""
    return {"weight": np.full((2, 1, 2), value, np.float32)}


def value_of(arrays: Arrays) -> float:
    (value,) = np.unique(arrays["weight"])
    return float(value)


class Scripted(HypothesisStrategy):
    """Training takes theta to theta + 1, and validating theta = 0, 1, 2, ... costs the losses given.

    Parameters
    ----------
    losses : sequence of float or None
        None where no validation client answers; none at all where there is no validation client.
    stuck : collection of int
        Rounds with too few releases.
    """

    def __init__(self, losses: Sequence[float | None] = (), stuck: Iterable[int] = ()) -> None:
        super().__init__()
        self.losses, self.stuck = losses, set(stuck)
        self.participations = np.array([0, 0, 0])
        self.trained: list[tuple[int, float, ConfigRecord]] = []
        self.validated: list[tuple[int, float]] = []

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        self.now = value_of(from_array_record(arrays))
        self.trained.append((server_round, self.now, config))
        return [Message(RecordDict(), 100, "train", group_id=str(server_round))]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        assert [reply.metadata.message_type for reply in replies] == ["train"]
        self.participations[:2] += 1
        counts = {"asked": 3, "releases": 2, "lost-nodes": 1, "groups": [2, 0]}
        moved = None if server_round in self.stuck else to_array_record(theta(self.now + 1))
        return moved, MetricRecord(counts)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        if not self.losses:
            return []
        self.validated.append((server_round, value_of(from_array_record(arrays))))
        return [Message(RecordDict(), 100, "evaluate", group_id=str(server_round))]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        if not self.losses:
            assert list(replies) == []
            return None
        assert [reply.metadata.message_type for reply in replies] == ["evaluate"]
        loss = self.losses[int(self.validated[-1][1])]
        return None if loss is None else MetricRecord({"loss": loss, "metric": 2 * loss, "clients": 1})


class SpyGrid(InProcessGrid):
    """The in-process grid; keeps what goes through it and gives replies back in another order."""

    def __init__(self, app: Any, run_config: Any = {}) -> None:  # noqa: B006
        super().__init__(app, run_config)
        self.exchanges: list[list[str]] = []
        self.lifetimes: list[float] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.exchanges.append([message.metadata.message_type for message in messages])
        self.lifetimes.append(max(message.metadata.ttl for message in messages))
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return list(super().pull_messages(message_ids))[::-1]


def echo(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


def settings(strategy: HypothesisStrategy, **changes: Any) -> Settings:
    """Return the settings of a run of five rounds that validates in each."""
    plain = Settings(
        strategy=strategy,
        model=LINEAR,
        manifest=None,
        seed=0,
        rounds=5,
        patience=0,
        validate_every=1,
        restarts=1,
        round_timeout=12.0,
        train_config=ConfigRecord({"step_size": 0.5}),
    )
    return replace(plain, **changes)


def play(strategy: Scripted, **changes: Any) -> tuple[State, SpyGrid]:
    """Run the rounds from theta(1) = 0."""
    state = State(hypotheses=theta(0), best=theta(0))
    grid = SpyGrid(echo)
    run_rounds(settings(strategy, **changes), grid, state, lambda _: None)
    return state, grid


# --- a round


def test_a_round_trains_and_validates_in_one_exchange() -> None:
    _, grid = play(Scripted([9, 8, 7, 6, 5, 4]))
    assert grid.exchanges == [["train", "evaluate"]] * 5 + [["evaluate"]]


def test_what_is_validated_is_what_the_round_starts_from() -> None:
    strategy = Scripted([9, 8, 7, 6, 5, 4])
    state, _ = play(strategy)
    started = [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
    assert [(round, value) for round, value, _ in strategy.trained] == started
    assert strategy.validated == [*started, (6, 5)]
    assert [entry.loss for entry in state.history] == [9, 8, 7, 6, 5, 4]
    assert [entry.metric for entry in state.history] == [18, 16, 14, 12, 10, 8]


def test_a_round_is_told_what_the_demands_have_in_common() -> None:
    strategy = Scripted()
    play(strategy, rounds=1)
    assert strategy.trained[0][2] == {"step_size": 0.5}


def test_the_history_holds_what_came_out() -> None:
    state, _ = play(Scripted([9, 8, 7]), rounds=2)
    first, second, last = (replace(entry, seconds=0.0) for entry in state.history)
    assert first == Round(
        number=1,
        loss=9.0,
        metric=18.0,
        asked=3,
        releases=2,
        lost_nodes=1,
        groups=[2, 0],
        nearest=[0.0, 0.0],
        moved=True,
        best_round=1,
        median_participations=1.0,
        max_participations=1,
        seconds=0.0,
    )
    assert (second.number, second.best_round, second.max_participations) == (2, 2, 2)
    assert (last.number, last.asked, last.releases, last.groups, last.moved) == (3, 0, 0, [], False)
    assert all(entry.seconds >= 0 for entry in state.history)


def test_each_round_is_reported_when_it_is_over() -> None:
    state = State(hypotheses=theta(0), best=theta(0))
    seen: list[Any] = []
    run_rounds(
        settings(Scripted([9, 8, 7]), rounds=2),
        SpyGrid(echo),
        state,
        lambda s: seen.append((len(s.history), value_of(s.hypotheses), s.stopped)),
    )
    assert seen == [(1, 1, ""), (2, 2, ""), (3, 2, "all 2 rounds done")]


def test_without_validation_the_last_round_is_reported_once_too() -> None:
    state = State(hypotheses=theta(0), best=theta(0))
    seen: list[int] = []
    run_rounds(settings(Scripted(), rounds=3), SpyGrid(echo), state, lambda s: seen.append(len(s.history)))
    assert seen == [1, 2, 3]
    assert state.stopped == "all 3 rounds done"


def test_a_run_goes_on_where_it_was_broken_off() -> None:
    strategy = Scripted([9, 8, 7, 6, 5, 4])
    state = State(hypotheses=theta(0), best=theta(0))

    def pull_the_plug(state: State) -> None:
        if len(state.history) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_rounds(settings(strategy), SpyGrid(echo), state, pull_the_plug)
    run_rounds(settings(strategy), SpyGrid(echo), state, lambda _: None)
    assert [entry.number for entry in state.history] == [1, 2, 3, 4, 5, 6]
    assert [(round, value) for round, value, _ in strategy.trained] == [(t, t - 1) for t in range(1, 6)]


# --- a strategy that is done


class Done(Scripted):
    """Has learnt what it wanted after two rounds."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        self.remarks.append(f"remark {server_round}")
        if server_round == 2:
            self.finished = "it knows enough"
        return super().aggregate_train(server_round, replies)


@pytest.mark.parametrize("losses", [(), (9, 8, 7, 6, 5, 4)])
def test_a_strategy_that_is_finished_ends_the_run_and_says_why(losses: Sequence[float]) -> None:
    state = State(hypotheses=theta(0), best=theta(0))
    seen: list[tuple[int, str, list[str]]] = []
    run_rounds(
        settings(Done(losses)),
        SpyGrid(echo),
        state,
        lambda s: seen.append((len(s.history), s.stopped, list(s.remarks))),
    )
    assert seen == [(1, "", ["remark 1"]), (2, "it knows enough", ["remark 1", "remark 2"])]


def test_why_it_is_finished_comes_before_patience() -> None:
    state, _ = play(Done([1, 2, 3, 4, 5, 6]), patience=1)
    assert len(state.history) == 2
    assert state.stopped == "it knows enough"


def test_a_run_without_a_leak_meter_finds_no_leaks() -> None:
    assert play(Scripted())[0].leaks == []


# --- too few releases


def test_a_round_with_too_few_releases_leaves_the_hypotheses_and_says_so() -> None:
    state, _ = play(Scripted([9, 8, 7, 6], stuck=[2, 3]), rounds=4)
    assert [entry.moved for entry in state.history] == [True, False, False, True, False]
    # theta is 0, 1, 1, 1 at the start of the rounds and 2 after them.
    assert [entry.loss for entry in state.history] == [9, 8, 8, 8, 7]
    assert value_of(state.hypotheses) == 2


# --- the best


def test_the_best_are_those_that_were_validated_not_those_they_became() -> None:
    state, _ = play(Scripted([9, 5, 7, 8, 6, 7]))
    assert value_of(state.best) == 1
    assert (state.best_loss, state.best_round) == (5, 2)
    assert [entry.best_round for entry in state.history] == [1, 2, 2, 2, 2, 2]
    assert value_of(state.hypotheses) == 5


def test_the_last_round_of_training_can_leave_the_best() -> None:
    state, _ = play(Scripted([9, 8, 7, 6, 5, 4]))
    assert value_of(state.best) == 5
    assert (state.best_loss, state.best_round) == (4, 6)


def test_of_two_as_good_the_first_is_the_best() -> None:
    state, _ = play(Scripted([9, 5, 5, 5, 5, 5]))
    assert state.best_round == 2


def test_the_best_at_any_time_is_the_best_so_far() -> None:
    state = State(hypotheses=theta(0), best=theta(0))
    seen: list[float] = []
    run_rounds(settings(Scripted([5, 9, 4, 8, 3, 7])), SpyGrid(echo), state, lambda s: seen.append(value_of(s.best)))
    assert seen == [0, 0, 2, 2, 4, 4]


def test_without_validation_clients_all_rounds_run_and_the_newest_are_kept() -> None:
    state, grid = play(Scripted(), patience=1)
    assert grid.exchanges == [["train"]] * 5
    assert state.stopped == "all 5 rounds done"
    assert value_of(state.best) == value_of(state.hypotheses) == 5
    assert state.best_round == 0
    assert [entry.loss for entry in state.history] == [None] * 5


def test_until_a_validation_client_answers_the_newest_are_kept() -> None:
    state, _ = play(Scripted([None, None, 7, None, 8, 9]))
    assert [entry.loss for entry in state.history] == [None, None, 7, None, 8, 9]
    assert [entry.best_round for entry in state.history] == [0, 0, 3, 3, 3, 3]
    assert value_of(state.best) == 2
    state, _ = play(Scripted([None] * 6))
    assert value_of(state.best) == 5
    assert math.isinf(state.best_loss)


# --- patience


def test_patience_ends_a_run_that_gets_no_better() -> None:
    strategy = Scripted([9, 5, 6, 5, 7, 1])
    state, _ = play(strategy, rounds=100, patience=3)
    assert [entry.number for entry in state.history] == [1, 2, 3, 4, 5]
    assert state.stopped == "no better hypotheses in 3 validations"
    assert value_of(state.best) == 1


def test_a_better_loss_renews_patience() -> None:
    state, _ = play(Scripted([9, 9, 8, 8, 7, 7, 7]), rounds=6, patience=2)
    assert len(state.history) == 7
    assert state.stopped == "all 6 rounds done"


def test_no_patience_runs_all_rounds() -> None:
    state, _ = play(Scripted([1, 2, 3, 4, 5, 6]), patience=0)
    assert state.stopped == "all 5 rounds done"
    assert value_of(state.best) == 0


def test_patience_counts_validations_not_rounds() -> None:
    # Rounds 1, 4, 7 and 10 validate theta = 0, 3, 6 and 9.
    state, _ = play(Scripted([5] * 20), rounds=20, patience=2, validate_every=3)
    assert [entry.number for entry in state.history if entry.loss is not None] == [1, 4, 7]
    assert len(state.history) == 7


def test_a_validation_that_nobody_answers_is_none() -> None:
    state, _ = play(Scripted([5, None, None, None, 6, 7]), patience=2)
    assert state.stopped == "all 5 rounds done"


# --- validating now and then


@pytest.mark.parametrize(
    ("every", "validated"), [(1, [1, 2, 3, 4, 5, 6]), (2, [1, 3, 5, 6]), (3, [1, 4, 6]), (9, [1, 6])]
)
def test_rounds_in_between_train_alone(every: int, validated: list[int]) -> None:
    state, grid = play(Scripted([9, 8, 7, 6, 5, 4]), validate_every=every)
    assert [number for number, kinds in enumerate(grid.exchanges, 1) if "evaluate" in kinds] == validated
    assert [entry.number for entry in state.history if entry.loss is not None] == validated
    assert all("train" in kinds for kinds in grid.exchanges[:5])


# --- initial hypotheses


def test_drawn_hypotheses_are_stacked_and_all_different() -> None:
    drawn = draw_hypotheses(LINEAR, k=4, seed=0, restart=0)
    assert {name: value.shape for name, value in drawn.items()} == {"weight": (4, 1, 2)}
    assert drawn["weight"].dtype == np.float32
    assert len(np.unique(drawn["weight"])) == 8


def test_drawn_hypotheses_depend_on_seed_restart_and_place_alone() -> None:
    def weights(k: int = 3, seed: int = 5, restart: int = 1) -> list[Any]:
        return draw_hypotheses(LINEAR, k, seed, restart)["weight"].tolist()

    assert weights() == weights()
    assert weights(k=5)[:3] == weights()
    others = [*weights(seed=6), *weights(restart=2)]
    assert not any(one in others for one in weights())


def test_drawn_hypotheses_come_from_the_models_own_initialiser() -> None:
    # The linear model draws from N(0, 1): the mean of 4000 numbers has a standard deviation of .016.
    drawn = flatten(draw_hypotheses(LINEAR, k=2000, seed=0, restart=0))
    assert abs(drawn.mean()) < 0.08
    assert abs(drawn.std() - 1) < 0.06


class Judge:
    """A node with one client of each kind, whose loss is the first number of the first hypothesis."""

    def __init__(self, validation: int = 1, fails: bool = False) -> None:
        self.app = ClientApp()
        self.rounds: list[Any] = []

        @self.app.query()
        def query(message: Message, context: Context) -> Message:
            return Message(RecordDict({COUNTS: Hosting(7, validation, 0, 1).to_record()}), reply_to=message)

        @self.app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            if fails:
                raise RuntimeError("cannot")
            self.rounds.append(message.content.config_records[CONFIG]["clients"])
            first = flatten(from_array_record(message.content.array_records[HYPOTHESES]))[0, 0]
            return Message(evaluate_reply(np.array([first]), np.array([0.0])), reply_to=message)


@pytest.mark.parametrize("seed", range(5))
def test_of_several_initial_sets_the_one_of_lowest_loss_is_taken(seed: int) -> None:
    grid = SpyGrid(Judge().app)
    chosen = initial_hypotheses(settings(GroupPrivacy(), seed=seed, restarts=5), grid)
    sets = [draw_hypotheses(LINEAR, 2, seed, restart)["weight"] for restart in range(5)]
    np.testing.assert_array_equal(chosen["weight"], min(sets, key=lambda weights: weights[0, 0, 0]))


def test_the_seeds_above_do_not_all_choose_the_same_restart() -> None:
    firsts = [[draw_hypotheses(LINEAR, 2, s, r)["weight"][0, 0, 0] for r in range(5)] for s in range(5)]
    assert len(set(np.argmin(firsts, axis=1).tolist())) > 1


def test_all_initial_sets_are_scored_in_one_exchange() -> None:
    grid = SpyGrid(Judge().app)
    initial_hypotheses(settings(GroupPrivacy(), restarts=3), grid)
    assert grid.exchanges == [["query"], ["evaluate"] * 3]
    assert grid.lifetimes[1] == 12.0


def test_one_initial_set_is_taken_as_it_is() -> None:
    grid = SpyGrid(Judge().app)
    chosen = initial_hypotheses(settings(GroupPrivacy(), seed=3), grid)
    np.testing.assert_array_equal(chosen["weight"], draw_hypotheses(LINEAR, 2, 3, 0)["weight"])
    assert grid.exchanges == []


@pytest.mark.parametrize("judge", [Judge(validation=0), Judge(fails=True)], ids=["nobody validates", "nobody answers"])
def test_where_no_set_is_scored_the_first_is_taken(judge: Judge) -> None:
    chosen = initial_hypotheses(settings(GroupPrivacy(), restarts=4), SpyGrid(judge.app))
    np.testing.assert_array_equal(chosen["weight"], draw_hypotheses(LINEAR, 2, 0, 0)["weight"])


def test_each_hypothesis_is_measured_against_the_nearest_other_one() -> None:
    assert distances(np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])) == [5.0, 1.0, 1.0]
    assert distances(np.array([[3.0, 4.0]])) == []


@pytest.mark.parametrize(
    "spent", [[0], [3], [0, 0, 3], [0, 2, 3], [0, 0, 2, 4], [0, 0, 0, 4], [0, 2, 4, 6], [1, 2], [0, 2], [0, 0]]
)
def test_the_median_is_the_median_however_few_have_released(spent: list[int]) -> None:
    assert _median(np.array(spent)) == np.median(spent)
