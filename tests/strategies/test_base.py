"""What all strategies share: what they make of releases, what they keep, and Flower's own hooks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy

import umbel.client.app
from tests.helpers.errors import raises
from tests.helpers.grids import PaperGrid, stack, vectors
from tests.helpers.runs import run_app
from tests.helpers.scripted import on
from umbel import models
from umbel.nodes.fleet import Fleet
from umbel.protocol.arrays import Labels, Matrix, Vectors, mean_of
from umbel.protocol.errors import ConfigError
from umbel.protocol.messages import hypotheses_in, training_in
from umbel.protocol.records import from_array_record, to_array_record
from umbel.protocol.releases import Releases
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import TrainingSpec
from umbel.server.run import draw_hypotheses
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid
from umbel.strategies.base import HypothesisStrategy

COMMON: dict[str, Any] = {
    "local_epochs": 3, "step_size": 0.1, "batch_size": 10, "noise_multiplier": 5.0, "noise_per": "vector",
}  # fmt: skip
HYPOTHESES_SENT = [(0, 0, 0), (10, 10, 10)]
# Two releases near each of the hypotheses.
RELEASE = {0: (1, 0, 2), 1: (9, 9, 9), 2: (3, 0, 4), 3: (9, 9, 13)}
MEANS = [[2, 0, 3], [9, 9, 11]]


class Halves(HypothesisStrategy):
    """A strategy to check by hand: a release whose first number is above 5 belongs to hypothesis 1."""

    def assign(self, releases: Vectors, hypotheses: Matrix, choices: Labels | None) -> Labels:
        return (releases[:, 0] > 5).astype(np.int64)


class Rehearsal:
    """A round of `Halves` with all the training clients of simulated nodes on paper."""

    def __init__(
        self,
        nodes: int = 1,
        kind: type[HypothesisStrategy] = Halves,
        run: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.grid = PaperGrid.simulated(train=4, nodes=nodes)
        self.strategy = on(Fleet(clients_per_round=4, **run), kind(foreign_loop=True, **options))

    def ask(self, round: int = 1, sent: Any = HYPOTHESES_SENT) -> list[Message]:
        """Return the messages of a round."""
        return self.strategy.configure_train(round, to_array_record(stack(sent)), ConfigRecord(COMMON), self.grid)

    def answer(self, messages: list[Message], **changes: Any) -> list[Message]:
        """Return replies in which the clients release `RELEASE`."""
        return self.grid.releases(messages, (RELEASE | changes.get("release", {})).__getitem__)

    def end(self, replies: list[Message]) -> tuple[list[list[float]] | None, MetricRecord]:
        """Return the next hypotheses as vectors, None where they did not move, and the counts."""
        following, counts = self.strategy.aggregate_train(1, replies)
        assert counts is not None
        return None if following is None else vectors(from_array_record(following)).tolist(), counts


# --- asking


def test_a_round_asks_for_what_the_strategy_and_the_run_say() -> None:
    clipped = {"clipping": "public norm=0.8 decay=0.5"}
    (message,) = Rehearsal(run=clipped).ask(round=3)
    np.testing.assert_array_equal(vectors(hypotheses_in(message.content)), HYPOTHESES_SENT)
    assert training_in(message.content) == TrainingSpec(
        round=3, clients=(0, 1, 2, 3), clipping="public", clip_norm=0.2, disclose_choice=False, **COMMON
    )


def test_other_arrays_in_the_same_record_are_sent_as_they_are_now() -> None:
    """A record is read once; a strategy may keep one and change what is in it."""
    rehearsal, record = Rehearsal(), to_array_record(stack(HYPOTHESES_SENT))
    for values in (HYPOTHESES_SENT, [(1, 2, 3), (4, 5, 6)]):
        record.update(to_array_record(stack(values)))
        (message,) = rehearsal.strategy.configure_train(1, record, ConfigRecord(COMMON), rehearsal.grid)
        np.testing.assert_array_equal(vectors(hypotheses_in(message.content)), values)
        np.testing.assert_array_equal(vectors(rehearsal.strategy.sent), values)


# --- training


@pytest.mark.parametrize("nodes", [1, 3])
def test_each_group_of_releases_is_averaged_without_weights(nodes: int) -> None:
    rehearsal = Rehearsal(nodes)
    following, counts = rehearsal.end(rehearsal.answer(rehearsal.ask()))
    assert following == MEANS
    assert counts == {"asked": 4, "releases": 4, "lost-nodes": 0, "groups": [2, 2]}


def test_a_group_without_releases_keeps_its_hypothesis() -> None:
    rehearsal = Rehearsal()
    replies = rehearsal.answer(rehearsal.ask(), release={1: (1, 1, 1), 3: (3, 3, 3)})
    following, counts = rehearsal.end(replies)
    (outcome,) = rehearsal.strategy.history
    assert outcome.longest is not None
    np.testing.assert_allclose(outcome.longest, [math.sqrt(27), 0], err_msg="(3, 3, 3) from the origin; no release")
    assert outcome.clients.tolist() == [0, 1, 2, 3]
    assert outcome.groups.tolist() == [0] * 4
    assert outcome.releases is None, "releases of three parameters cannot be drawn in the plane"
    assert following == [[2, 1, 2.5], [10, 10, 10]]
    assert counts["groups"] == [4, 0]


def test_assign_sees_releases_in_client_order_and_combine_each_group_by_itself() -> None:
    seen: dict[str, Any] = {"groups": []}

    class Curious(Halves):
        def assign(self, releases: Any, hypotheses: Any, choices: Any) -> Any:
            seen.update(releases=releases.tolist(), hypotheses=hypotheses.tolist(), choices=choices)
            return super().assign(releases, hypotheses, choices)

        def combine(self, group: Matrix, hypothesis: Matrix, index: int) -> Matrix:
            seen["groups"].append((index, len(group), hypothesis.tolist()))
            return group.max(axis=0)

    rehearsal = Rehearsal(nodes=3, kind=Curious)
    following, _ = rehearsal.end(rehearsal.answer(rehearsal.ask())[::-1])
    assert following == [[3, 0, 4], [9, 9, 13]]
    assert seen == {
        "releases": [list(RELEASE[client]) for client in range(4)],
        "hypotheses": [list(hypothesis) for hypothesis in HYPOTHESES_SENT],
        "choices": None,
        "groups": [(0, 2, [0, 0, 0]), (1, 2, [10, 10, 10])],
    }


@pytest.mark.parametrize(("released", "moved"), [(0, False), (2, False), (3, True)])
def test_fewer_releases_than_the_least_leave_the_hypotheses(released: int, moved: bool) -> None:
    rehearsal = Rehearsal(nodes=4, min_releases=3)
    following, _ = rehearsal.end(rehearsal.answer(rehearsal.ask())[:released])
    (outcome,) = rehearsal.strategy.history
    assert (following is not None) == moved
    assert len(outcome.clients) == released
    assert outcome.counts.sum() == (released if moved else 0)
    assert moved or set(outcome.groups.tolist()) <= {-1}
    assert sum(rehearsal.strategy.nodes.participations) == released, "they count even where the hypotheses stay"


def test_a_strategy_may_move_a_hypothesis_in_place_and_ask_for_something_else() -> None:
    """The longest update is measured from the hypothesis as it was sent: 3 of client 2's, and 4 of client 3's."""

    class InPlace(Halves):
        def decisions(self, round: int) -> dict[str, Any]:
            return super().decisions(round) | {"local_epochs": round}

        def combine(self, group: Matrix, hypothesis: Matrix, index: int) -> Matrix:
            hypothesis += group.mean(axis=0) - hypothesis
            return hypothesis

    rehearsal = Rehearsal(kind=InPlace)
    messages = rehearsal.ask(round=7)
    task = training_in(messages[0].content)
    assert task is not None
    assert task.local_epochs == 7
    moved, _ = rehearsal.end(rehearsal.answer(messages))
    (found,) = rehearsal.strategy.history
    assert found.longest is not None
    assert found.longest.tolist() == [5, math.sqrt(11)]
    assert moved == MEANS


# --- evaluation


def test_scores_are_flowers_metrics() -> None:
    """Validation clients follow the two training clients."""
    loss = {2: 1.0, 3: 2.0, 4: 4.0, 5: 9.0}
    grid, strategy = PaperGrid.simulated(train=2, validation=4, nodes=3), on(Fleet(clients_per_round=1), Halves())
    messages = strategy.configure_evaluate(1, to_array_record(stack(HYPOTHESES_SENT)), ConfigRecord(), grid)
    replies = grid.scores(messages, loss.__getitem__)
    spread = [1.0, 2.0, 4.0, 4.0, 9.0]
    assert strategy.aggregate_evaluate(1, replies) == {
        "loss": 4.0, "metric": 40.0, "clients": 4, "exact": 4,
        "loss_spread": spread, "metric_spread": [10 * value for value in spread], "noise": 0.0, "bound": 0.0,
    }  # fmt: skip
    assert strategy.aggregate_evaluate(1, []) is None


# --- options and state


def test_a_strategy_may_refuse_a_run_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: Halves, run: RunConfig, model: models.Model) -> None:
        if model.num_parameters > run.rounds:
            raise ConfigError(f"strategy {run.strategy!r} needs a round a parameter; set rounds higher")

    monkeypatch.setattr(Halves, "check", check)
    Setup.parse({"strategy": f"{__name__}:Halves", "rounds": 2})
    with raises(ConfigError, "config"):
        Setup.parse({"strategy": f"{__name__}:Halves", "rounds": 1})


def test_a_strategy_may_learn_in_a_way_of_its_own() -> None:
    """Without groups: what is not of assigning and combining is `learn`."""

    class Total(Halves):
        def learn(self, round: int, releases: Releases) -> Any:
            total = self.state.get("total", np.zeros(3)) + releases.vectors.sum(axis=0)
            self.state["total"] = total
            return super().learn(round, releases)

    rehearsal = Rehearsal(kind=Total)
    for round in (1, 2):
        rehearsal.end(rehearsal.answer(rehearsal.ask(round)))
    assert rehearsal.strategy.state["total"].tolist() == [44, 36, 56]


# --- the loop


def test_start_runs_a_strategy_as_umbels_app_does(run_config: dict[str, Any]) -> None:
    run_config |= {"strategy": "geometric-median", "rounds": 3, "restarts": 1, "seed": 4}
    by_umbel = run_app(run_config, InProcessGrid(umbel.client.app.app, run_config, nodes=2)).arrays("latest")

    setup = Setup.parse(run_config)
    start = to_array_record(draw_hypotheses(setup.model, setup.strategy.hypotheses, seed=4, restart=0))
    grid = InProcessGrid(umbel.client.app.app, run_config, nodes=2)
    config = setup.task().to_record()
    result = setup.strategy.start(grid, start, num_rounds=3, train_config=config, evaluate_config=config)
    np.testing.assert_array_equal(from_array_record(result.arrays)["weight"], by_umbel["weight"])
    assert [result.train_metrics_clientapp[t]["releases"] for t in (1, 2, 3)] == [7, 7, 7]
    assert [result.evaluate_metrics_clientapp[t]["clients"] for t in (0, 1, 2, 3)] == [100, 100, 100, 100]


def test_flowers_own_loop_runs_it_too(run_config: dict[str, Any]) -> None:
    """It trains the same, and evaluates after each round in a separate exchange."""
    setups = [Setup.parse(run_config | {"seed": 4}) for _ in range(2)]
    start = to_array_record(draw_hypotheses(setups[0].model, 2, seed=4, restart=0))
    config, results = setups[0].task().to_record(), []
    for setup, run in zip(setups, (HypothesisStrategy.start, Strategy.start), strict=True):
        grid = InProcessGrid(umbel.client.app.app, run_config, nodes=2)
        setup.strategy.allows_several = True
        results.append(run(setup.strategy, grid, start, num_rounds=3, train_config=config, evaluate_config=config))
    ours, flowers = results
    trained = [from_array_record(result.arrays)["weight"] for result in results]
    np.testing.assert_array_equal(*trained)
    assert ours.train_metrics_clientapp == flowers.train_metrics_clientapp
    both = [[result.evaluate_metrics_clientapp[r]["loss"] for r in (1, 2, 3)] for result in results]
    assert both[0] == both[1], "metrics at r describe the hypotheses after r rounds"


def test_another_loop_than_start_is_refused_for_several_hypotheses() -> None:
    rehearsal = Rehearsal()
    rehearsal.strategy.allows_several = False
    with raises(ConfigError, "config.foreign-loop"):
        rehearsal.ask()


# --- a strategy of one's own that returns something else


@pytest.mark.parametrize(
    ("method", "made"),
    [
        ("combine", lambda self, group, *_: group.mean()),  # NumPy would fill a hypothesis with a number
        ("combine", lambda self, *_: ["1", "2", "3"]),
        ("combine", lambda self, group, *_: group.mean(axis=0) * 1j),
        ("reshape", lambda self, round, moved, *_: np.concatenate([moved, moved[:1] + 1])),
        ("reshape", lambda self, round, moved, *_: moved.ravel()),
    ],
)
def test_other_hypotheses_than_the_run_has_are_refused(method: str, made: Any) -> None:
    """A guarantee counts on at most as many hypotheses as the run names."""
    rehearsal = Rehearsal(kind=type("Own", (Halves,), {method: made}))
    with raises(ConfigError, f"config.{method}"):
        rehearsal.end(rehearsal.answer(rehearsal.ask()))


@pytest.mark.parametrize(
    ("name", "kept", "fits"),
    [
        *(("times", kept, False) for kept in (3, [1.0], np.array(["a"]), np.ones(2, np.longdouble))),
        ("times", np.ones(2, ">f8"), False),  # a file holds it in another order, so its digest differs
        (1, np.ones(2), False),
        *(("times", kept, True) for kept in (np.float64(3), np.ones(2, np.float16), np.ones((2, 3), np.uint64).T)),
        ("times", np.array([True]), True),
    ],
)
def test_a_state_that_no_folder_can_keep_is_refused(name: Any, kept: Any, fits: bool) -> None:
    class Counting(Halves):
        def combine(self, group: Matrix, hypothesis: Matrix, index: int) -> Matrix:
            self.state[name] = kept
            return mean_of(group)

    rehearsal = Rehearsal(kind=Counting)
    with nullcontext() if fits else raises(ConfigError, "config.state"):
        rehearsal.end(rehearsal.answer(rehearsal.ask()))
