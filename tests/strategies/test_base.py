"""What all strategies share: what they make of releases, what they keep, and Flower's own hooks."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord
from numpy.typing import NDArray
from pydantic import Field

import umbel.client.app
from tests.helpers.errors import raises
from tests.helpers.grids import ListeningGrid, PaperGrid, error_reply, failing, stack, vectors
from tests.helpers.messages import releases as releases_of
from tests.helpers.runs import run_app
from umbel import models, strategies
from umbel.protocol.arrays import flatten
from umbel.protocol.errors import ConfigError
from umbel.protocol.messages import hypotheses_in, training_in
from umbel.protocol.plugins import NoOptions
from umbel.protocol.records import from_array_record, to_array_record
from umbel.protocol.release import Clipping, ClipSchedule
from umbel.protocol.releases import Releases
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import TrainingSpec
from umbel.server.nodes.fleet import Fleet
from umbel.server.rounds import draw_hypotheses
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid
from umbel.strategies import GroupPrivacy
from umbel.strategies.base import HypothesisStrategy

COMMON: dict[str, Any] = {
    "local_epochs": 3,
    "step_size": 0.1,
    "batch_size": 10,
    "noise_multiplier": 5.0,
    "noise_per": "vector",
}
HYPOTHESES_SENT = [(0, 0, 0), (10, 10, 10)]
# Two releases near each of the hypotheses.
RELEASE = {0: (1, 0, 2), 1: (9, 9, 9), 2: (3, 0, 4), 3: (9, 9, 13)}
MEANS = [[2, 0, 3], [9, 9, 11]]


class Halves(HypothesisStrategy):
    """A strategy to check by hand: a release whose first number is above 5 belongs to hypothesis 1."""

    def assign(
        self, releases: NDArray[np.float64], hypotheses: NDArray[np.float64], choices: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        return (releases[:, 0] > 5).astype(np.int64)


class Rehearsal:
    """A round of `Halves` with all the training clients of simulated nodes on paper."""

    def __init__(
        self, nodes: int = 1, clients: int = 4, kind: type[HypothesisStrategy] = Halves, **options: Any
    ) -> None:
        self.grid = PaperGrid.simulated(train=clients, nodes=nodes)
        self.strategy = kind(Fleet(clients_per_round=clients), **options)

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
    radius = ClipSchedule(Clipping.PUBLIC, start=0.8, decay=0.5)
    (message,) = Rehearsal(radius=radius).ask(round=3)
    np.testing.assert_array_equal(vectors(hypotheses_in(message.content)), HYPOTHESES_SENT)
    assert training_in(message.content) == TrainingSpec(
        round=3, clients=(0, 1, 2, 3), clipping="public", clip_norm=0.2, disclose_choice=False, **COMMON
    )


def test_a_strategy_may_ask_for_something_else() -> None:
    class Patient(Halves):
        def task(self, round: int, template: TrainingSpec) -> TrainingSpec:
            return replace(super().task(round, template), local_epochs=round)

    (message,) = Rehearsal(kind=Patient).ask(round=7)
    task = training_in(message.content)
    assert task is not None
    assert task.local_epochs == 7


# --- training


@pytest.mark.parametrize("nodes", [1, 3])
def test_each_group_of_releases_is_averaged_without_weights(nodes: int) -> None:
    rehearsal = Rehearsal(nodes)
    following, counts = rehearsal.end(rehearsal.answer(rehearsal.ask()))
    assert following == MEANS
    assert counts == {"asked": 4, "releases": 4, "lost-nodes": 0, "groups": [2, 2]}


def test_the_next_hypotheses_have_the_names_shapes_and_types_of_the_last() -> None:
    rehearsal = Rehearsal()
    (message,) = messages = rehearsal.ask()
    following, _ = rehearsal.strategy.aggregate_train(1, rehearsal.answer(messages))
    assert following is not None
    before, after = hypotheses_in(message.content), from_array_record(following)
    assert [(name, value.shape, value.dtype) for name, value in after.items()] == [
        (name, value.shape, value.dtype) for name, value in before.items()
    ]


def test_a_group_without_releases_keeps_its_hypothesis() -> None:
    rehearsal = Rehearsal()
    replies = rehearsal.answer(rehearsal.ask(), release={1: (1, 1, 1), 3: (3, 3, 3)})
    outcome = rehearsal.strategy.train(1, replies)
    assert outcome.longest is not None
    np.testing.assert_allclose(outcome.longest, [math.sqrt(27), 0], err_msg="(3, 3, 3) from the origin; no release")
    assert outcome.clients.tolist() == [0, 1, 2, 3]
    assert outcome.groups.tolist() == [0] * 4
    assert outcome.releases is None, "releases of three parameters cannot be drawn in the plane"
    following, counts = rehearsal.end(replies)
    assert following == [[2, 1, 2.5], [10, 10, 10]]
    assert counts["groups"] == [4, 0]


def test_releases_that_are_too_few_go_nowhere() -> None:
    rehearsal = Rehearsal()
    replies = rehearsal.answer(rehearsal.ask())
    rehearsal.strategy.min_releases = 9
    outcome = rehearsal.strategy.train(1, replies)
    assert len(outcome.clients) == 4
    assert outcome.groups.tolist() == [-1] * 4


def test_combine_sees_each_group_by_itself() -> None:
    class Largest(Halves):
        def combine(
            self, group: NDArray[np.float64], hypothesis: NDArray[np.float64], index: int
        ) -> NDArray[np.float64]:
            seen.append((index, len(group), hypothesis.tolist()))
            return group.max(axis=0)

    seen: list[tuple[int, int, list[float]]] = []
    rehearsal = Rehearsal(kind=Largest)
    following, _ = rehearsal.end(rehearsal.answer(rehearsal.ask()))
    assert following == [[3, 0, 4], [9, 9, 13]]
    assert seen == [(0, 2, [0, 0, 0]), (1, 2, [10, 10, 10])]


def test_a_strategy_that_a_run_would_not_hear_is_an_error() -> None:
    with pytest.raises(TypeError, match="override train and validate"):

        class Hooked(Halves):
            def aggregate_train(self, server_round: int, replies: Any) -> Any: ...


def test_assign_sees_releases_in_client_order_and_what_was_broadcast() -> None:
    seen: dict[str, Any] = {}

    class Curious(Halves):
        def assign(self, releases: Any, hypotheses: Any, choices: Any) -> Any:
            seen.update(releases=releases.tolist(), hypotheses=hypotheses.tolist(), choices=choices)
            return super().assign(releases, hypotheses, choices)

    rehearsal = Rehearsal(nodes=3, kind=Curious)
    rehearsal.end(rehearsal.answer(rehearsal.ask())[::-1])
    assert seen == {
        "releases": [list(RELEASE[client]) for client in range(4)],
        "hypotheses": [list(hypothesis) for hypothesis in HYPOTHESES_SENT],
        "choices": None,
    }


@pytest.mark.parametrize(("released", "moved"), [(0, False), (2, False), (3, True)])
def test_fewer_releases_than_the_least_leave_the_hypotheses(released: int, moved: bool) -> None:
    rehearsal = Rehearsal(nodes=4, min_releases=3)
    following, counts = rehearsal.end(rehearsal.answer(rehearsal.ask())[:released])
    assert (following is not None) == moved
    assert counts["releases"] == released
    assert sum(counts["groups"]) == (released if moved else 0)
    assert sum(rehearsal.strategy.fleet.participations) == released, "they count even where the hypotheses stay"


# --- replies that are of no use, of which `tests/server/nodes/test_replies.py` knows more


@pytest.mark.parametrize("lost", [1, 2])
def test_what_is_lost_is_left_out(lost: int) -> None:
    rehearsal = Rehearsal(nodes=2)
    messages = rehearsal.ask()
    replies = [*rehearsal.answer(messages)[: 2 - lost], *(error_reply(message) for message in messages[2 - lost :])]
    following, counts = rehearsal.end(replies)
    # The first node hosts clients 0 and 2, both near hypothesis 0.
    assert following == ([MEANS[0], [10, 10, 10]] if lost == 1 else None)
    assert counts == {"asked": 4, "releases": 4 - 2 * lost, "lost-nodes": lost, "groups": [4 - 2 * lost, 0]}


# --- evaluation


def test_scores_are_flowers_metrics() -> None:
    """Validation clients follow the two training clients."""
    loss = {2: 1.0, 3: 2.0, 4: 4.0, 5: 9.0}
    grid, strategy = PaperGrid.simulated(train=2, validation=4, nodes=3), Halves(Fleet(clients_per_round=1))
    messages = strategy.configure_evaluate(1, to_array_record(stack(HYPOTHESES_SENT)), ConfigRecord(), grid)
    replies = grid.scores(messages, loss.__getitem__)
    spread = [1.0, 2.0, 4.0, 4.0, 9.0]
    assert strategy.aggregate_evaluate(1, replies) == {
        "loss": 4.0, "metric": 40.0, "clients": 4,
        "loss_spread": spread, "metric_spread": [10 * value for value in spread],
    }  # fmt: skip
    assert strategy.aggregate_evaluate(1, []) is None


# --- options


@dataclass(frozen=True)
class MixingOptions:
    """Two of them, each with a bound."""

    old_share: Annotated[float, Field(ge=0, lt=1)] = 0.25
    rounds: Annotated[int, Field(ge=1)] = 3
    name: str = "mixing"
    loud: bool = False


class Mixing(GroupPrivacy):
    """Keeps a share of each hypothesis."""

    Options: ClassVar[type] = MixingOptions

    def combine(self, group: NDArray[np.float64], hypothesis: NDArray[np.float64], index: int) -> NDArray[np.float64]:
        share: float = self.options.old_share
        return share * hypothesis + (1 - share) * group.mean(axis=0)


@pytest.fixture
def mixing(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a strategy with options."""
    monkeypatch.setitem(strategies.STRATEGIES, "mixing", Mixing)
    return "mixing"


def made(name: str, options: str = "") -> HypothesisStrategy:
    return strategies.make(RunConfig(strategy=name, strategy_options=options), Fleet())


def test_options_are_the_strategys_own_and_have_defaults(mixing: str) -> None:
    assert made(mixing).options == MixingOptions()
    assert made(mixing, "old-share=0.5 rounds=7").options == MixingOptions(0.5, 7)
    assert made(mixing, "old_share=0 name=other loud=true").options == MixingOptions(0.0, name="other", loud=True)
    assert Mixing(Fleet(), options=MixingOptions(0.75)).options.old_share == 0.75
    assert Mixing(Fleet()).options == MixingOptions()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("old-share=1", (ConfigError, "config.option-value", "1", "strategy-options", "old_share")),
        ("old-share=-0.1", (ConfigError, "config.option-value", "-0.1", "strategy-options", "old_share")),
        ("old-share=much", (ConfigError, "config.option-value", "much", "strategy-options", "old_share")),
        ("rounds=1.5", (ConfigError, "config.option-value", "1.5", "strategy-options", "rounds")),
        ("loud=perhaps", (ConfigError, "config.option-value", "perhaps", "strategy-options")),
        ("oldshare=0.5", (ConfigError, "config.unknown-option", "strategy-options", "old_share")),
        ("x=1", (ConfigError, "config.unknown-option", "strategy-options", "old_share", "rounds")),
        ("rounds", (ConfigError, "config.option-pairs", "rounds", "strategy-options")),
        ("rounds=1 rounds=2", (ConfigError, "config.option-pairs", "strategy-options")),
    ],
)
def test_options_that_cannot_be_used_are_named(mixing: str, text: str, reason: Any) -> None:
    with raises(*reason):
        made(mixing, text)


def test_a_strategy_without_options_takes_none() -> None:
    assert made("ifca").options == NoOptions()
    with raises(ConfigError, "config.unknown-option", "strategy-options"):
        made("ifca", "trim=2")


def test_an_option_changes_what_a_strategy_makes_of_a_group(mixing: str) -> None:
    rehearsal = Rehearsal(kind=Mixing, options=MixingOptions(0.5))
    following, _ = rehearsal.end(rehearsal.answer(rehearsal.ask()))
    assert following == [[1, 0, 1.5], [9.5, 9.5, 10.5]]


def test_a_strategy_may_refuse_a_run_before_any_work(mixing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: Mixing, run: RunConfig, model: models.Model) -> None:
        if model.num_parameters > run.rounds:
            raise ConfigError(f"strategy {run.strategy!r} needs a round a parameter; set rounds higher")

    monkeypatch.setattr(Mixing, "check", check)
    Setup.parse({"strategy": mixing, "rounds": 2})
    with raises(ConfigError, "config", "'mixing'", "rounds"):
        Setup.parse({"strategy": mixing, "rounds": 1})


# --- state


def test_state_is_a_strategys_own_and_starts_empty() -> None:
    first, second = Mixing(Fleet()), Mixing(Fleet())
    first.state["sum"] = np.ones(3)
    assert second.state == {}


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


# --- in words


def test_the_summary_says_what_will_be_done(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        Halves(Fleet(clients_per_round=12), hypotheses=3, radius=ClipSchedule(Clipping.PUBLIC)).summary()
    assert caplog.messages == ["Halves: k = 3 hypotheses, 12 clients a round, clipping public"]


# --- a strategy of one's own

NEWCOMER = '''
"""The median of each cluster, which a few bad releases cannot move."""
import numpy as np

from umbel.strategies.group_privacy import GroupPrivacy


class Median(GroupPrivacy):
    def combine(self, group, hypothesis, index):
        return np.median(group, axis=0)
'''


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a strategy in a file of a few lines, outside the app."""
    (tmp_path / "umbel_test_newcomer.py").write_text(NEWCOMER)
    monkeypatch.syspath_prepend(tmp_path)
    yield "umbel_test_newcomer:Median"
    sys.modules.pop("umbel_test_newcomer", None)


def test_a_newcomers_strategy_runs_from_its_import_path(newcomer: str, run_config: dict[str, Any]) -> None:
    run_config |= {"strategy": newcomer, "hypotheses": 1, "rounds": 1, "clients-per-round": 5}
    grid = ListeningGrid(umbel.client.app.app, run_config, nodes=2)
    run = run_app(run_config, grid)
    releases = np.concatenate([flatten(releases_of(r)) for _, r in grid.exchanged("1") if "arrays" in r.content])
    assert releases.shape == (5, 2)
    np.testing.assert_array_equal(flatten(run.arrays("latest"))[0], np.median(releases, axis=0).astype(np.float32))


def test_flowers_own_start_runs_a_strategy(newcomer: str, run_config: dict[str, Any]) -> None:
    run_config |= {"strategy": newcomer, "rounds": 3, "restarts": 1, "seed": 4}
    by_umbel = run_app(run_config, InProcessGrid(umbel.client.app.app, run_config, nodes=2)).arrays("latest")

    setup = Setup.parse(run_config)
    start = to_array_record(draw_hypotheses(setup.model, setup.strategy.hypotheses, seed=4, restart=0))
    grid = InProcessGrid(umbel.client.app.app, run_config, nodes=2)
    config = setup.task().to_record()
    result = setup.strategy.start(grid, start, num_rounds=3, train_config=config, evaluate_config=config)
    np.testing.assert_array_equal(from_array_record(result.arrays)["weight"], by_umbel["weight"])
    assert [result.train_metrics_clientapp[t]["releases"] for t in (1, 2, 3)] == [7, 7, 7]
    assert [result.evaluate_metrics_clientapp[t]["clients"] for t in (1, 2, 3)] == [100, 100, 100]


def test_start_goes_on_over_a_round_without_releases(run_config: dict[str, Any]) -> None:
    def app(message: Message, context: Any) -> Message:
        broken = message.metadata.group_id == "2"
        return failing({0, 1} if broken else (), ["training"])(message, context)

    setup = Setup.parse(run_config)
    start = to_array_record(draw_hypotheses(setup.model, 2, seed=0, restart=0))
    grid = InProcessGrid(app, run_config, nodes=2)
    result = GroupPrivacy(setup.fleet).start(grid, start, num_rounds=3, train_config=setup.task().to_record())
    assert [result.train_metrics_clientapp[t]["releases"] for t in (1, 2, 3)] == [7, 0, 7]
    assert [result.train_metrics_clientapp[t]["lost-nodes"] for t in (1, 2, 3)] == [0, 2, 0]


def test_start_runs_a_strategy_with_state_to_the_end(run_config: dict[str, Any]) -> None:
    class Counting(GroupPrivacy):
        def combine(self, group: Any, hypothesis: Any, index: int) -> Any:
            self.state["times"] = self.state.get("times", np.zeros(self.hypotheses, int))
            self.state["times"][index] += 1
            return super().combine(group, hypothesis, index)

    setup = Setup.parse(run_config)
    start = to_array_record(draw_hypotheses(setup.model, 2, seed=0, restart=0))
    strategy = Counting(setup.fleet)
    strategy.start(
        InProcessGrid(umbel.client.app.app, run_config), start, num_rounds=4, train_config=setup.task().to_record()
    )
    assert strategy.state["times"].max() == 4
