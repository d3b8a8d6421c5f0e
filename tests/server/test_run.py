"""The rounds of a run, played with a strategy whose every number is written down beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord

from tests.helpers.errors import raises
from tests.helpers.replies import evaluation_reply
from tests.helpers.scripted import LINEAR, After, Scripted, SpyGrid, on, run_of, setup, theta, value_of
from umbel.models import load
from umbel.nodes.fleet import Fleet
from umbel.protocol.arrays import flatten
from umbel.protocol.errors import FleetError
from umbel.protocol.messages import hosting_reply, hypotheses_in
from umbel.protocol.records import to_array_record
from umbel.protocol.tasks import Hosting
from umbel.server.history import Round, State, distances
from umbel.server.run import draw_hypotheses, initial_hypotheses, ratios
from umbel.simulation import in_process
from umbel.strategies import Callback, GroupPrivacy


def play(strategy: Scripted, *callbacks: Callback, **changes: Any) -> tuple[State, SpyGrid]:
    """Run the rounds from theta(1) = 0."""
    run = run_of(strategy, *callbacks, **changes)
    run.do()
    assert isinstance(run.grid, SpyGrid)
    return run.state, run.grid


# --- a round


def test_a_round_trains_and_validates_what_it_starts_from_in_one_exchange() -> None:
    strategy = Scripted([9, 8, 7, 6, 5, 4])
    state, grid = play(strategy)
    assert grid.exchanges == [[["evaluation", "training"]]] * 5 + [[["evaluation"]]], "in one message to the node"
    assert [(round, value) for round, value, _ in strategy.trained] == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
    assert strategy.validated == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5)], "after so many rounds"
    assert [entry.loss for entry in state.history] == [9, 8, 7, 6, 5, 4]
    assert [entry.metric for entry in state.history] == [18, 16, 14, 12, 10, 8]
    asked = strategy.trained[0][2]
    assert asked == setup(Scripted()).task("mine").to_record()
    assert (asked["step_size"], asked["run"]) == (0.5, "mine")


def test_a_round_that_no_node_answers_is_repeated_once_nodes_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exchanges of round 3 fail; the history has each round once."""
    run = run_of(strategy := Scripted([9, 8, 7, 6, 5, 4]))
    fleet, waited, asked = run.fleet, [], []
    exchange = fleet.exchange

    def failing(round: int, *rest: Any) -> tuple[list[Message], list[Message]]:
        asked.append(round)
        replies = exchange(round, *rest)
        fleet.unanswered = asked.count(round) < 3 and round == 3
        return replies

    monkeypatch.setattr(fleet, "exchange", failing)
    monkeypatch.setattr(fleet, "wait", lambda round, *_: waited.append(round))
    run.do()
    assert asked == waited == [1, 2, 3, 3, 3, 4, 5, 6]
    assert [entry.number for entry in run.state.history] == [0, 1, 2, 3, 4, 5]
    assert [round for round, _, _ in strategy.trained] == [1, 2, 3, 3, 3, 4, 5]


def test_the_history_holds_what_came_out() -> None:
    state, _ = play(Scripted([9, 8, 7]), rounds=2)
    start, first, second = (replace(entry, seconds=0.0, stages={}) for entry in state.history)
    assert start == Round(number=0, loss=9.0, metric=18.0, nearest=[0.0, 0.0])
    assert first == Round(
        number=1, loss=8.0, metric=16.0, asked=3, releases=2, lost_nodes=1, groups=[2, 0], nearest=[0.0, 0.0],
        moved=True, best_round=1, median_participations=1.0, max_participations=1, seconds=0.0,
    )  # fmt: skip
    assert (second.number, second.loss, second.best_round, second.max_participations) == (2, 7, 2, 2)
    for entry in state.history[1:]:
        assert [*entry.stages] == ["pause", "sites", "validation", "aggregation"]
        assert entry.seconds == pytest.approx(sum(entry.stages.values()), abs=0.003), "rounded to a millisecond each"


@pytest.mark.parametrize(
    ("losses", "changes", "complete"),
    [
        ([9, 8, 7], {}, [[0], [1], [2]]),
        ([9, 8, 7], {"validation": "every=2"}, [[0, 1], [], [2]]),
        ([9, 9, 9], {"patience": 1}, [[0], [1]]),
        ([], {}, [[0, 1], [2]]),
    ],
)
def test_a_round_is_complete_once_no_validation_of_it_is_to_come(
    losses: list[float], changes: dict[str, Any], complete: list[list[int]]
) -> None:
    seen: list[list[int]] = []
    run = run_of(
        Scripted(losses), After(lambda _: seen.append([entry.number for entry in run.complete])), rounds=2, **changes
    )
    run.do()
    assert seen == complete


# --- a run that is stopped


def stopping(at: int, why: str) -> Callback:
    return After(lambda state: why if state.history[-1].number == at else None)


@pytest.mark.parametrize("losses", [(), (9, 8, 7, 6, 5, 4), (1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("at", [2, 5])
def test_a_callback_ends_the_run_after_the_round_and_the_first_says_why(losses: Sequence[float], at: int) -> None:
    seen: list[tuple[int, str]] = []
    told = After(lambda s: seen.append((s.history[-1].number, s.stopped)))
    state, grid = play(Scripted(losses), stopping(at, "it knows enough"), stopping(at, "so do I"), told)
    assert seen == [*((number, "") for number in range(1, at)), (at, "it knows enough")]
    assert state.stopped == "it knows enough"
    assert len(grid.exchanges) == at, "and there is no evaluation afterwards"
    if losses and losses[0] == 1:
        state, _ = play(Scripted(losses), stopping(at, "it knows enough"), patience=1)
        assert (state.history[-1].number, state.stopped) == (1, "no better hypotheses in 1 validation"), "umbel's own"


# --- a strategy that does all by itself


def test_what_a_strategy_makes_of_replies_is_heard() -> None:
    class Own(Scripted):
        merge = True

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            _, counts = super().aggregate_train(server_round, replies)
            return to_array_record(theta(10 * server_round)), counts

        def aggregate_evaluate(self, server_round: int, replies: Any) -> MetricRecord | None:
            return MetricRecord({"loss": 99.0 - server_round, "metric": 0.5, "clients": 3, "mine": 1.0})

    state, _ = play(Own([1] * 50), rounds=3)
    assert [entry.loss for entry in state.history] == [99, 98, 97, 96]
    assert [entry.metric for entry in state.history] == [0.5] * 4
    assert value_of(state.hypotheses) == 30
    assert value_of(state.best) == 30
    assert all(entry.moved for entry in state.history[1:])


# --- what is kept


@pytest.mark.parametrize(
    ("losses", "stuck", "validated", "best", "newest"),
    [
        ([9, 8, 7, 6, 5, 4], [], [9, 8, 7, 6, 5, 4], [0, 1, 2, 3, 4, 5], 5),  # of the last round of training
        ([9, 5, 7, 8, 5, 7], [], [9, 5, 7, 8, 5, 7], [0, 1, 1, 1, 1, 1], 5),
        ([None, None, 7, None, 8, 9], [], [None, None, 7, None, 8, 9], [0, 1, 2, 2, 2, 2], 5),
        ([None] * 6, [], [None] * 6, [0, 1, 2, 3, 4, 5], 5),  # until one validates, the newest are kept
        ([], [], [None] * 6, [0, 1, 2, 3, 4, 5], 5),
        # Too few releases leave theta as it is: 0 before the rounds, and 1, 1, 1, 2, 3 after them.
        ([9, 8, 7, 6], [2, 3], [9, 8, 8, 8, 7, 6], [0, 1, 1, 1, 4, 5], 3),
    ],
)
def test_the_best_are_those_that_were_validated_best_so_far(
    losses: list[float | None], stuck: list[int], validated: list[float | None], best: list[int], newest: int
) -> None:
    seen: list[float] = []
    state, grid = play(Scripted(losses, stuck=stuck), After(lambda s: seen.append(value_of(s.best))))
    assert [entry.loss for entry in state.history] == validated
    assert [entry.best_round for entry in state.history] == best
    assert [entry.moved for entry in state.history] == [False, *(number not in stuck for number in range(1, 6))]
    assert value_of(state.hypotheses) == newest
    there = [loss for loss in validated if loss is not None]
    assert state.best_loss == min(there, default=math.inf)
    assert (state.best_round, value_of(state.best)) == (best[-1], best[-1] - len(stuck))
    if not losses:
        assert grid.exchanges == [[["training"]]] * 5
    elif None not in losses and not stuck:
        assert seen == best, "at any time"


# --- patience


@pytest.mark.parametrize(
    ("losses", "changes", "rounds", "reason"),
    [
        ([9, 5, 6, 5, 7, 1], {"patience": 3}, 5, "no better hypotheses in 3 validations"),
        ([9, 9, 9, 9, 9, 9], {"patience": 1}, 2, "no better hypotheses in 1 validation"),
        ([9, 8, 7, 6, 5, 4], {"patience": 1}, 6, "all 5 rounds done"),
        ([9, 9, 9, 9, 9, 9], {"patience": 0}, 6, "all 5 rounds done"),
        ([9, 8, 7, 6, 5, 5], {"patience": 1}, 6, "all 5 rounds done"),
        ([], {"patience": 1}, 6, "all 5 rounds done"),
        ([5] * 20, {"patience": 2, "validation": "every=3", "rounds": 20}, 7, "no better hypotheses in 2 validations"),
        # A validation that nobody answers is none.
        ([5, None, None, None, 6, 7], {"patience": 2}, 6, "all 5 rounds done"),
    ],
)
def test_patience_ends_a_run_that_gets_no_better(
    losses: list[float | None], changes: dict[str, Any], rounds: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    state, _ = play(Scripted(losses), **changes)
    assert (len(state.history), state.stopped) == (rounds, reason)
    told = [message.split(":")[0] for message in caplog.messages if "no validation client reported" in message]
    assert told == [f"round {number}" for number, loss in enumerate(losses) if loss is None]


def test_where_patience_may_end_the_run_validation_goes_alone() -> None:
    """Round 3 might be the last and is better, so that it trains; round 5 is the last, and does not."""
    run = run_of(strategy := Scripted([5, 6, 4, 7, 8, 9]), patience=2)
    run.do()
    both, alone, training = [["evaluation", "training"]], [["evaluation"]], [["training"]]
    assert run.grid.exchanges == [both, both, alone, training, both, alone]  # type: ignore[attr-defined]
    assert [round for round, *_ in strategy.trained] == [1, 2, 3, 4]
    assert [entry.asked for entry in run.state.history] == [0, 3, 3, 3, 3]
    assert run.fleet.participations.tolist() == [4, 4, 0], "nobody is charged in the round that ends the run"
    assert value_of(run.state.hypotheses) == 4, "which have been validated"
    assert (run.state.best_round, value_of(run.state.best)) == (2, 2)
    for entry in run.state.history[1:]:
        assert [*entry.stages] == ["pause", "sites", "validation", "aggregation"]


def test_a_validation_that_belongs_to_the_training_goes_with_it() -> None:
    """As where both are in one secure sum, of which a site joins one a round."""

    class Joint(Scripted):
        validates_alone = False  # type: ignore[assignment]

    state, grid = play(Joint([5, 6, 7, 8]), patience=1)
    assert grid.exchanges == [[["evaluation", "training"]]] * 2
    assert state.stopped == "no better hypotheses in 1 validation"
    assert [entry.asked for entry in state.history] == [0, 3, 3]


# --- validating now and then


@pytest.mark.parametrize(("every", "validated"), [(2, [0, 2, 4, 5]), (3, [0, 3, 5]), (9, [0, 5])])
def test_rounds_in_between_train_alone(every: int, validated: list[int]) -> None:
    state, grid = play(Scripted([9, 8, 7, 6, 5, 4]), validation=f"every={every}")
    assert [number for number, (asks,) in enumerate(grid.exchanges) if "evaluation" in asks] == validated
    assert [entry.number for entry in state.history if entry.loss is not None] == validated
    assert all("training" in asks for (asks,) in grid.exchanges[:5])


# --- initial hypotheses


def test_drawn_hypotheses_depend_on_seed_restart_and_place_alone() -> None:
    def weights(k: int = 3, seed: int = 5, restart: int = 1) -> list[Any]:
        return draw_hypotheses(LINEAR, k, seed, restart)["weight"].tolist()

    assert draw_hypotheses(LINEAR, 3, 5, 1)["weight"].dtype == np.float32
    assert np.shape(weights()) == (3, 1, 2)
    assert len(np.unique(weights())) == 6
    assert weights() == weights()
    assert weights(k=5)[:3] == weights()
    others = [*weights(seed=6), *weights(restart=2)]
    assert not any(one in others for one in weights())


def test_a_single_linear_hypothesis_begins_at_0_and_others_differ() -> None:
    dense = load("linear inputs=2 outputs=1")
    assert not any(value.any() for value in draw_hypotheses(dense, 1, seed=0, restart=0).values())
    assert len(np.unique(draw_hypotheses(dense, 2, seed=0, restart=0)["1.weight"])) == 4
    assert draw_hypotheses(LINEAR, 1, seed=0, restart=0)["weight"].all(), "the paper draws its own"
    assert draw_hypotheses(load("mlp"), 1, seed=0, restart=0)["0.weight"].all()


def judge(validation: int = 1, fails: bool = False) -> SpyGrid:
    """A node with one client of each kind, whose loss is the first number of the first hypothesis."""

    def app(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query":
            return Message(hosting_reply(Hosting(7, validation, 0, 1)), reply_to=message)
        if fails:
            raise RuntimeError("cannot")
        first = flatten(hypotheses_in(message.content))[0, 0]
        return Message(evaluation_reply(np.array([first]), np.array([0.0])), reply_to=message)

    return SpyGrid(app)


def chosen(grid: SpyGrid, **changes: Any) -> Any:
    return initial_hypotheses(setup(on(Fleet(clients_per_round=7), GroupPrivacy()), **changes), grid)["weight"]


@pytest.mark.parametrize("seed", range(2))
def test_of_several_initial_sets_the_one_of_lowest_loss_is_taken_after_one_exchange(seed: int) -> None:
    grid, nobody = judge(), judge(validation=0)
    sets = [draw_hypotheses(LINEAR, 2, seed, restart)["weight"] for restart in range(5)]
    best = min(sets, key=lambda weights: weights[0, 0, 0])
    np.testing.assert_array_equal(chosen(grid, seed=seed, restarts=5), best)
    assert grid.exchanges == [[["version"]], [["evaluation", "hypotheses"]] * 5]
    assert grid.lifetimes[1] == 12.0
    np.testing.assert_array_equal(chosen(nobody, seed=seed, restarts=4), sets[0])
    unasked = judge()
    np.testing.assert_array_equal(chosen(unasked, seed=seed), sets[0])
    assert unasked.exchanges == []


def test_where_no_reply_is_usable_the_run_ends_before_anybody_trains() -> None:
    with raises(FleetError, "nodes.no-scores"):
        chosen(judge(fails=True), restarts=4)


def test_eq_9s_ratio_is_an_updates_length_as_a_part_of_the_distance_to_the_next_hypothesis() -> None:
    assert distances(np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])) == [5.0, 1.0, 1.0], "to the nearest other"
    assert distances(np.array([[3.0, 4.0]])) == []
    assert ratios(np.array([1.0, 0.0, 3.0]), [4.0, 2.0, 2.0]) == [0.25, 0.0, 1.5]
    assert ratios(np.array([1.0, 0.0]), [0.0, 0.0]) == [np.inf, 0.0]
    assert ratios(np.array([1.0]), []) == []


def test_a_round_keeps_eq_9s_ratio(run_config: dict[str, Any]) -> None:
    first, last = in_process.play(run_config | {"rounds": 1}).state.history
    assert len(last.ratio) == len(last.nearest) == len(first.nearest) == 2
    assert [ratio > 0 for ratio in last.ratio] == [count > 0 for count in last.groups]
    assert first.ratio == [], "nobody trained"
