"""The clients of a run: who is asked, what they are sent, and when a round closes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message
from scipy.stats import chi2

import umbel.client.app
import umbel.nodes.fleet
import umbel.nodes.roster
import umbel.protocol.presence
from tests.helpers.errors import raises
from tests.helpers.grids import PaperGrid, error_reply, failing, stack, vectors
from tests.helpers.paper import paper_task
from umbel.nodes.fleet import Fleet
from umbel.protocol.errors import FleetError
from umbel.protocol.flower import ErrorCode
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.messages import evaluation_in, hypotheses_in
from umbel.protocol.tasks import EvaluationSpec, Hosting
from umbel.simulation.grid import InProcessGrid

COMMON = paper_task(local_epochs=3)
SENT = [(0, 0, 0), (10, 10, 10)]
RECORD = Hypotheses(stack(SENT))


# --- asking for training


def test_a_round_sends_one_message_a_node() -> None:
    """Validation clients follow the training clients."""
    grid, fleet = PaperGrid.simulated(train=7, validation=4, nodes=3), Fleet(clients_per_round=7)
    training = fleet.ask_training(4, RECORD, COMMON, grid).messages
    evaluation = fleet.ask_evaluation(4, RECORD, EvaluationSpec(step_size=0.5, run="mine"), grid).messages
    asked = {"train": [[0, 3, 6], [1, 4], [2, 5]], "evaluate": [[9], [7, 10], [8]]}
    for messages, (kind, clients) in zip((training, evaluation), asked.items(), strict=True):
        assert [message.metadata.dst_node_id for message in messages] == [100, 101, 102]
        assert {(one.metadata.message_type, one.metadata.group_id) for one in messages} == {(kind, "4")}
        assert [grid.asked(message) for message in messages] == clients
    np.testing.assert_array_equal(vectors(hypotheses_in(evaluation[0].content)), SENT)
    assert evaluation_in(evaluation[0].content) == EvaluationSpec(round=4, clients=(3,), step_size=0.5, run="mine")


def test_clients_with_a_limit_take_turns_until_all_have_had_theirs() -> None:
    """Ten clients are asked twice each, three at a time, so two remain for round 7; all have a turn before a second."""
    grid, fleet = PaperGrid.simulated(train=10), Fleet(clients_per_round=3, max_participations=2)
    turns = np.zeros(10, int)
    for number in range(1, 8):
        assert not fleet.used_up
        (message,) = fleet.ask_training(number, RECORD, COMMON, grid).messages
        turns[grid.asked(message)] += 1
        assert np.ptp(turns) <= 1
    assert turns.tolist() == [2] * 10
    assert fleet.used_up


# --- a pause


class Elsewhere(PaperGrid):
    """Nodes on paper that are not in the server's process, so that a run waits for them.

    They reply to a round's message as `answers` says; else never.
    """

    in_process = False

    def answers(self, message: Message) -> list[Message]:
        return []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        queries = [*super().push_messages(one for one in sent if one.metadata.message_type == "query")]
        for message in sent[len(queries) :]:
            message.metadata.__dict__["_message_id"] = f"round {message.metadata.dst_node_id}"
            self.waiting += self.answers(message)
        return [message.metadata.message_id for message in sent]


def paused(
    monkeypatch: pytest.MonkeyPatch, looks: list[list[int]], says: dict[int, Hosting] | None = None, **run: Any
) -> tuple[Fleet, Elsewhere, list[float]]:
    """Return a fleet whose clients have released, its grid, and the seconds that it will have waited."""
    grid = Elsewhere(says or {5: Hosting(2, 0), 6: Hosting(2, 0)}, looks=[[5, 6], *looks])
    fleet, now, slept = Fleet(clients_per_round=2, **run), [1000.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    fleet.roster(grid)
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(umbel.nodes.fleet, "time", clock)
    monkeypatch.setattr(umbel.nodes.roster, "time", clock)
    monkeypatch.setattr(umbel.protocol.presence, "time", clock)
    fleet.participations[0] = 1
    return fleet, grid, slept


def test_a_run_pauses_while_fewer_nodes_are_there_than_it_needs_and_continues_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flwr")
    fleet, grid, slept = paused(monkeypatch, [[5]] * 20 + [[5, 6]], wait="below=2")
    fleet.wait(3, grid)
    assert len(slept) == 20
    assert max(slept) <= 5
    first, last = caplog.messages[-2:]
    assert "node 6 (offline since" in first
    assert "round 3" in last
    fleet.wait(4, grid)
    assert len(slept) == 20, "all are there"


@pytest.mark.parametrize("released", [True, False])
def test_without_any_node_a_run_fails_after_its_longest_pause(monkeypatch: pytest.MonkeyPatch, released: bool) -> None:
    fleet, grid, slept = paused(monkeypatch, [[]], wait="pause=60")
    fleet.participations[0] = released
    if released:
        with raises(FleetError, "nodes.away"):
            fleet.wait(3, grid)
        assert 60 <= sum(slept) < 66
    else:
        fleet.wait(1, grid)
        assert not slept, "nodes that refuse from the start would be waited for in vain"


def test_a_site_that_comes_with_a_new_key_ends_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    says = {5: Hosting(2, 0), 6: Hosting(2, 0), 7: Hosting(3, 0)}
    fleet, grid, _ = paused(monkeypatch, [[], [], [7]], says, wait="pause=60")
    fleet.wait(3, grid)
    assert fleet.roster(grid).train == 7
    assert [node for node, _ in fleet.roster(grid).nodes] == [5, 6, 7]


def test_in_simulation_a_run_does_not_wait() -> None:
    grid, fleet = PaperGrid.simulated(train=4, nodes=2), Fleet(clients_per_round=2, wait="below=2")
    fleet.roster(grid)
    fleet.participations[0] = 1
    grid.looks = [[100]]
    fleet.wait(3, grid)


def test_a_round_that_connected_nodes_never_answer_ends_the_run_after_its_longest_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, grid, slept = paused(monkeypatch, [[5, 6]], wait="pause=60", max_participations=0)
    with raises(FleetError, "nodes.away"):
        for _ in range(20):
            fleet.wait(3, grid)
            fleet.exchange(3, grid, fleet.ask_training(3, RECORD, COMMON, grid).messages, timeout=0.01)
            assert fleet.unanswered
    assert 60 <= sum(slept) < 66


@pytest.mark.parametrize("partitions", [{0}, {0, 1}])
def test_a_round_that_nodes_refuse_is_not_repeated(linear_config: dict[str, Any], partitions: set[int]) -> None:
    """They would refuse it again, as when the budgets of all clients are used up."""
    grid, fleet = InProcessGrid(failing(partitions), linear_config, nodes=2), Fleet(clients_per_round=30)
    play_round(grid, fleet)
    assert not fleet.unanswered


@pytest.mark.parametrize(
    ("code", "asked"), [(ErrorCode.CLIENT_APP_CRASHED, 2), (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, 1)]
)
def test_a_site_whose_process_died_is_asked_again_at_once(linear_config: dict[str, Any], code: int, asked: int) -> None:
    class Dying(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            reply = super()._answer(message)
            return Message(Error(code, "died"), reply_to=message) if reply.metadata.src_node_id == 101 else reply

    grid, fleet = InProcessGrid(umbel.client.app.app, linear_config, nodes=2), Fleet(clients_per_round=30)
    fleet.roster(grid)
    grid.__class__ = Dying
    play_round(grid, fleet)
    assert len(fleet.ask_training(2, RECORD, COMMON, grid).messages) == asked


@pytest.mark.parametrize(("train", "asked"), [(2, [5, 6]), (0, [5])])
def test_a_site_that_refuses_to_report_still_trains(train: int, asked: list[int]) -> None:
    """One without training clients is left out of the next rounds' validation."""

    class Silent(Elsewhere):
        def answers(self, message: Message) -> list[Message]:
            refuses = message.metadata.dst_node_id == 6
            return [error_reply(message)] if refuses else self.scores([message], lambda _: 0.5)

    grid, fleet = Silent({5: Hosting(2, 2), 6: Hosting(train, 2)}), Fleet(clients_per_round=2 + train)
    fleet.roster(grid)
    validation = fleet.ask_evaluation(3, RECORD, EvaluationSpec(), grid)
    replies, _ = fleet.exchange(3, grid, validation.messages, timeout=60)
    assert fleet.read(validation, replies) is not None
    assert list(fleet.ask_training(3, RECORD, COMMON, grid).positions) == asked
    assert list(fleet.ask_evaluation(4, RECORD, EvaluationSpec(), grid).positions) == asked


# --- nodes that come


def test_a_node_that_the_run_did_not_wait_for_joins_when_it_answers() -> None:
    grid, fleet = PaperGrid({5: Hosting(4, 0), 6: Hosting(2, 0)}, slow={6: 1}), Fleet(clients_per_round=3)
    assert fleet.roster(grid).train == 4
    fleet.exchange(1, grid, [], timeout=60)
    assert fleet.roster(grid).train == 6
    assert grid.queried == [5, 6], "its first answer is waited for, and it is not asked for another"
    assert len(fleet.participations) == 6


def test_a_node_whose_invitation_was_lost_is_invited_again() -> None:
    lost = Error(ErrorCode.MESSAGE_UNAVAILABLE, "expired")
    refusal = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "refused")
    grid = PaperGrid({5: Hosting(4, 0), 6: [lost, Hosting(2, 0)], 7: refusal}, looks=[[5], [5, 6, 7]])
    fleet = Fleet(clients_per_round=3)
    assert fleet.roster(grid).train == 4
    for round in (1, 2):
        fleet.exchange(round, grid, [], timeout=60)
    assert fleet.roster(grid).train == 6
    assert grid.queried == [5, 6, 7, 6], "one that refuses is not asked again so soon"


def test_a_node_that_says_itself_that_it_is_gone_is_not_invited_more_often() -> None:
    gone = Error(ErrorCode.NODE_UNAVAILABLE, "gone")
    grid = PaperGrid({5: Hosting(4, 0), 6: gone}, looks=[[5], [5, 6]])
    grid.flowers = ()
    fleet = Fleet(clients_per_round=3)
    fleet.roster(grid)
    for round in range(1, 9):
        fleet.exchange(round, grid, [], timeout=60)
    assert grid.queried.count(6) == 3


def test_a_node_that_refused_joins_once_it_agrees() -> None:
    """As a site does whose people have approved the run meanwhile: at the start, or in any round."""
    refusal = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "refused")
    grid = PaperGrid({5: Hosting(4, 0), 6: [refusal] * 7 + [Hosting(2, 0)]})
    fleet = Fleet(clients_per_round=3)
    assert fleet.roster(grid).train == 4
    asked = []
    for round in range(1, 65):
        before = len(grid.queried)
        fleet.exchange(round, grid, [], timeout=60)
        asked += [round] * (len(grid.queried) - before)
    assert asked == [1, 3, 7, 15, 31, 47, 63], "ever more rarely, and every sixteenth round at last"
    assert fleet.roster(grid).train == 6


@pytest.mark.parametrize("share", [(0, 1), (0, 0), (0, -7), (3, -1)])
def test_a_node_that_names_a_share_cannot_join_where_nodes_serve_their_own(share: tuple[int, int]) -> None:
    """Whatever share it names: the run goes on."""
    grid = PaperGrid({5: Hosting(4, 0), 6: Hosting(2, 0, *share)}, looks=[[5], [5, 6]])
    fleet = Fleet(clients_per_round=3)
    fleet.roster(grid)
    fleet.exchange(1, grid, [], timeout=60)
    assert fleet.roster(grid).train == 4


def test_a_run_that_goes_on_counts_from_what_was_spent() -> None:
    grid, fleet = PaperGrid({6: Hosting(1, 0), 7: Hosting(2, 0)}), Fleet(clients_per_round=2)
    fleet.resume(grid, [(7, Hosting(2, 0)), (5, Hosting(3, 0))], {1: 4, 3: 2})
    assert fleet.participations.tolist() == [0, 4, 0, 2, 0, 0], "clients of 7, of 5 that is gone, and of 6 that is new"
    assert [node for node, _ in fleet.roster(grid).nodes] == [7, 5, 6]


# --- sampling


def sampled(round: int, nodes: int = 1, clients: int = 3, of: int = 10, **options: Any) -> list[int]:
    """Return the clients that are asked in a round."""
    grid = PaperGrid.simulated(train=of, nodes=nodes)
    asked = Fleet(clients_per_round=clients, max_participations=0, **options).ask_training(round, RECORD, COMMON, grid)
    numbers = sorted(number for message in asked.messages for number in grid.asked(message))
    assert numbers == asked.clients.tolist()
    return numbers


@pytest.mark.parametrize("nodes", [2, 13])
def test_the_same_clients_are_asked_whatever_the_number_of_nodes(nodes: int) -> None:
    for t in range(1, 6):
        assert sampled(round=t, nodes=nodes) == sampled(round=t)


def test_rounds_and_seeds_differ_in_their_samples() -> None:
    assert sampled(round=1, of=1000) == sampled(round=1, of=1000)
    assert sampled(round=1, of=1000) != sampled(round=2, of=1000)
    assert sampled(round=1, of=1000) != sampled(round=1, of=1000, seed=1)


def test_clients_are_asked_equally_often() -> None:
    rounds, clients, of = 500, 3, 10
    fleet, grid = Fleet(clients_per_round=clients, max_participations=0), PaperGrid.simulated(train=of)
    times = np.zeros(of)
    for t in range(1, rounds + 1):
        (message,) = fleet.ask_training(t, RECORD, COMMON, grid).messages
        times[grid.asked(message)] += 1
    # Each client is asked with probability p, and since a round asks a fixed number of clients
    # the counts are correlated by -1/(of - 1), which the factor before the sum makes up for.
    p = clients / of
    statistic = (of - 1) / of * np.square(times - rounds * p).sum() / (rounds * p * (1 - p))
    assert chi2.sf(statistic, of - 1) > 1e-6


def test_some_validation_clients_are_sampled_anew_each_round() -> None:
    def asked(round: int, nodes: int) -> list[int]:
        grid = PaperGrid.simulated(train=2, validation=1000, nodes=nodes)
        fleet = Fleet(clients_per_round=1, validation="clients=5")
        messages = fleet.ask_evaluation(round, RECORD, EvaluationSpec(), grid).messages
        return sorted(client for message in messages for client in grid.asked(message))

    assert len(set(asked(1, nodes=1))) == 5
    assert set(asked(1, nodes=1)) <= set(range(2, 1002))
    assert asked(1, nodes=1) == asked(1, nodes=3)
    assert asked(1, nodes=1) != asked(2, nodes=1)


# --- a round


@pytest.fixture
def linear_config(run_config: dict[str, Any]) -> dict[str, Any]:
    return run_config | {"noise-multiplier": 5.0}


def play_round(grid: InProcessGrid, fleet: Fleet, round: int = 1) -> list[Message]:
    """Do a round with the app's own nodes, and return their replies."""
    hypotheses = Hypotheses({"weight": np.array([[[5.0, 6.0]], [[4.0, -4.5]]], np.float32)})
    training = fleet.ask_training(round, hypotheses, COMMON, grid)
    evaluation = fleet.ask_evaluation(round, hypotheses, EvaluationSpec(), grid)
    replies, _ = fleet.exchange(round, grid, [*training.messages, *evaluation.messages], timeout=600)
    return replies


class SomeLate(InProcessGrid):
    """Nodes of which some answer only after a number of looks.

    Attributes
    ----------
    late : set of int
        Their ids.
    looks : int
        How many looks they will let go by.
    """

    late: frozenset[int] = frozenset()
    looks = 3

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.looks -= bool(self.late)
        if self.looks < 0:
            self.late = frozenset()
        held = {key for key, reply in self._replies.items() if reply.metadata.src_node_id in self.late}
        return super().pull_messages([one for one in message_ids if one not in held])


@pytest.mark.parametrize(("quorum", "closes"), [(0.75, True), (0.76, False)])
def test_a_round_closes_when_a_quorum_of_its_clients_has_answered(
    linear_config: dict[str, Any], quorum: float, closes: bool
) -> None:
    """Each of four nodes hosts a quarter of the clients: with one of them late, three quarters are there."""
    grid, fleet = SomeLate(umbel.client.app.app, linear_config, nodes=4), Fleet(clients_per_round=100, quorum=quorum)
    fleet.roster(grid)
    grid.late = frozenset({103})
    assert len(play_round(grid, fleet)) == (3 if closes else 4)
    if not closes:
        return
    assert grid.looks == 2, "at the first look"
    grid.late = frozenset()
    assert len(play_round(grid, fleet, round=2)) == 3, "it was silent and is left out for a round"
    assert fleet.dropped == 1
    assert len(play_round(grid, fleet, round=3)) == 4


@pytest.mark.parametrize("part", ["training", "evaluation"])
def test_a_node_that_does_one_part_alone_does_not_stand_in_for_the_other(
    linear_config: dict[str, Any], part: str
) -> None:
    """Three of four nodes answer at once, but with that part comes one alone."""
    grid = SomeLate(failing({0, 1}, [part]), linear_config, nodes=4)
    fleet = Fleet(clients_per_round=100, quorum=0.5)
    fleet.roster(grid)
    grid.late = frozenset({103})
    assert len(play_round(grid, fleet)) == 4, "the fourth is waited for"
