"""What all strategies share: whom they ask, which replies they take, and what they make of them."""

from __future__ import annotations

import io
import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2

import client.app
import server.app
from protocol.arrays import flatten
from protocol.errors import FleetError
from protocol.messages import ARRAYS, CONFIG, COUNTS, HYPOTHESES, SCORES, Demand, Hosting, train_reply
from protocol.records import from_array_record, to_array_record
from server.rounds import draw_hypotheses
from server.settings import Settings
from simulation.grid import InProcessGrid
from strategies import GroupPrivacy
from strategies.base import HypothesisStrategy, RadiusSchedule

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

    def __init__(self, paper: Any, nodes: int = 1, clients: int = 4, **options: Any) -> None:
        self.paper = paper
        self.grid = paper.Grid.simulated(train=clients, nodes=nodes)
        self.strategy = Halves(clients_per_round=clients, **options)

    def ask(self, round: int = 1, sent: Any = HYPOTHESES_SENT) -> list[Message]:
        """Return the messages of a round."""
        record = to_array_record(self.paper.stack(sent))
        return self.strategy.configure_train(round, record, ConfigRecord(COMMON), self.grid)

    def answer(self, messages: list[Message], **changes: Any) -> list[Message]:
        """Return replies in which the clients release `RELEASE`."""
        return self.grid.releases(messages, (RELEASE | changes.get("release", {})).__getitem__)

    def end(self, replies: list[Message]) -> tuple[list[list[float]] | None, MetricRecord]:
        """Return the next hypotheses as vectors, None where they did not move, and the counts."""
        following, counts = self.strategy.aggregate_train(1, replies)
        return None if following is None else self.paper.vectors(from_array_record(following)).tolist(), counts


# --- asking


def test_a_round_sends_one_message_a_node(paper: Any) -> None:
    rehearsal = Rehearsal(paper, nodes=3, clients=7)
    messages = rehearsal.ask(round=4)
    assert [message.metadata.dst_node_id for message in messages] == [100, 101, 102]
    assert {(message.metadata.message_type, message.metadata.group_id) for message in messages} == {("train", "4")}
    assert [rehearsal.grid.asked(message) for message in messages] == [[0, 3, 6], [1, 4], [2, 5]]


def test_a_node_without_a_sampled_client_gets_no_message(paper: Any) -> None:
    grid = paper.Grid.simulated(train=10, nodes=10)
    (message,) = Halves(clients_per_round=1).configure_train(
        1, to_array_record(paper.stack(HYPOTHESES_SENT)), ConfigRecord(COMMON), grid
    )
    assert len(grid.asked(message)) == 1


def test_a_message_holds_the_hypotheses_and_the_demand(paper: Any) -> None:
    radius = RadiusSchedule("public", start=0.8, decay=0.5)
    (message,) = Rehearsal(paper, radius=radius).ask(round=3)
    np.testing.assert_array_equal(
        paper.vectors(from_array_record(message.content.array_records[HYPOTHESES])), HYPOTHESES_SENT
    )
    assert Demand.from_record(message.content.config_records[CONFIG]) == Demand(
        round=3, clients=(0, 1, 2, 3), radius_mode="public", radius=0.2, disclose_choice=False, **COMMON
    )


def test_the_nodes_are_asked_what_they_host_once_a_run(paper: Any) -> None:
    rehearsal = Rehearsal(paper, nodes=2)
    rehearsal.ask(round=1)
    rehearsal.ask(round=2)
    assert rehearsal.grid.queried == [100, 101]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"clients_per_round": 5}, "clients-per-round = 5, but the nodes host only 4 such clients"),
        (
            {"clients_per_round": 4, "validation_clients_per_round": 3},
            "validation-clients-per-round = 3, but the nodes host only 2 such clients",
        ),
    ],
)
def test_more_clients_than_there_are_is_an_error_before_training(
    paper: Any, options: dict[str, int], reason: str
) -> None:
    grid = paper.Grid.simulated(train=4, validation=2)
    with pytest.raises(ValueError, match=reason):
        Halves(**options).roster(grid)


def test_more_releases_than_clients_are_asked_can_never_come(paper: Any) -> None:
    with pytest.raises(ValueError, match="min-releases = 4"):
        Halves(clients_per_round=3, min_releases=4).roster(paper.Grid.simulated(train=10))


def test_the_nodes_are_waited_for_as_the_strategy_says(paper: Any) -> None:
    with pytest.raises(FleetError, match="1 nodes host clients, 0 refused, and the run needs 2"):
        Halves(min_nodes=2, node_wait=0.01).roster(paper.Grid({5: Hosting(9, 0)}))


def test_a_node_that_the_run_did_not_wait_for_joins_when_it_answers(paper: Any) -> None:
    grid = paper.Grid({5: Hosting(4, 0), 6: Hosting(2, 0)}, slow={6: 1})
    strategy = Halves(clients_per_round=3)
    assert strategy.roster(grid).train == 4
    strategy.exchange(1, grid, [], timeout=60)
    assert strategy.roster(grid).train == 6
    assert grid.queried == [5, 6], "its first answer is waited for, and it is not asked for another"


def test_a_node_whose_invitation_was_lost_is_invited_again(paper: Any) -> None:
    lost = Error(ErrorCode.MESSAGE_UNAVAILABLE, "expired")
    refusal = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "refused")
    grid = paper.Grid({5: Hosting(4, 0), 6: [lost, Hosting(2, 0)], 7: refusal}, looks=[[5], [5, 6, 7]])
    strategy = Halves(clients_per_round=3)
    assert strategy.roster(grid).train == 4
    for round in (1, 2, 3):
        strategy.exchange(round, grid, [], timeout=60)
    assert strategy.roster(grid).train == 6
    assert grid.queried == [5, 6, 7, 6], "one that refuses is not asked again"


# --- sampling


def sampled(paper: Any, round: int, nodes: int = 1, clients: int = 3, of: int = 10, **options: Any) -> list[int]:
    """Return the clients that a strategy asks in a round."""
    grid = paper.Grid.simulated(train=of, nodes=nodes)
    strategy = Halves(clients_per_round=clients, **options)
    messages = strategy.configure_train(
        round, to_array_record(paper.stack(HYPOTHESES_SENT)), ConfigRecord(COMMON), grid
    )
    return sorted(number for message in messages for number in grid.asked(message))


def test_clients_are_sampled_without_replacement(paper: Any) -> None:
    assert sampled(paper, round=1, clients=10) == list(range(10))
    assert all(len(set(sampled(paper, round=t))) == 3 for t in range(1, 20))


@pytest.mark.parametrize("nodes", [2, 3, 10, 13])
def test_the_same_clients_are_asked_whatever_the_number_of_nodes(paper: Any, nodes: int) -> None:
    for t in range(1, 6):
        assert sampled(paper, round=t, nodes=nodes) == sampled(paper, round=t)


def test_rounds_and_seeds_differ_in_their_samples(paper: Any) -> None:
    assert sampled(paper, round=1, of=1000) == sampled(paper, round=1, of=1000)
    assert sampled(paper, round=1, of=1000) != sampled(paper, round=2, of=1000)
    assert sampled(paper, round=1, of=1000) != sampled(paper, round=1, of=1000, seed=1)


def test_clients_are_asked_equally_often(paper: Any) -> None:
    rounds, clients, of = 2000, 3, 10
    strategy = Halves(clients_per_round=clients)
    grid = paper.Grid.simulated(train=of)
    record = to_array_record(paper.stack(HYPOTHESES_SENT))
    times = np.zeros(of)
    for t in range(1, rounds + 1):
        (message,) = strategy.configure_train(t, record, ConfigRecord(COMMON), grid)
        times[grid.asked(message)] += 1
    # Each client is asked with probability p, and since a round asks a fixed number of clients
    # the counts are correlated by -1/(of - 1), which the factor before the sum makes up for.
    p = clients / of
    statistic = (of - 1) / of * np.square(times - rounds * p).sum() / (rounds * p * (1 - p))
    assert chi2.sf(statistic, of - 1) > 1e-6


# --- training


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_each_group_of_releases_is_averaged_without_weights(paper: Any, nodes: int) -> None:
    rehearsal = Rehearsal(paper, nodes)
    following, counts = rehearsal.end(rehearsal.answer(rehearsal.ask()))
    assert following == MEANS
    assert counts == {"asked": 4, "releases": 4, "lost-nodes": 0, "groups": [2, 2]}


def test_the_next_hypotheses_have_the_names_shapes_and_types_of_the_last(paper: Any) -> None:
    rehearsal = Rehearsal(paper)
    (message,) = messages = rehearsal.ask()
    following, _ = rehearsal.strategy.aggregate_train(1, rehearsal.answer(messages))
    before, after = (from_array_record(r) for r in (message.content.array_records[HYPOTHESES], following))
    assert [(name, value.shape, value.dtype) for name, value in after.items()] == [
        (name, value.shape, value.dtype) for name, value in before.items()
    ]


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.randoms(use_true_random=False))
def test_neither_the_number_of_nodes_nor_the_order_of_replies_changes_a_bit(
    paper: Any, seed: int, nodes: int, order: random.Random
) -> None:
    generator = np.random.default_rng(seed)
    release = dict(enumerate(generator.normal(5, 5, size=(7, 3)).tolist()))
    results = []
    for n in (1, nodes):
        rehearsal = Rehearsal(paper, n, clients=7)
        replies = rehearsal.grid.releases(rehearsal.ask(), release.__getitem__)
        order.shuffle(replies)
        results.append(rehearsal.end(replies))
    assert results[0] == results[1]


def test_a_group_without_releases_keeps_its_hypothesis(paper: Any) -> None:
    rehearsal = Rehearsal(paper)
    replies = rehearsal.answer(rehearsal.ask(), release={1: (1, 1, 1), 3: (3, 3, 3)})
    following, counts = rehearsal.end(replies)
    assert following == [[2, 1, 2.5], [10, 10, 10]]
    assert counts["groups"] == [4, 0]


def test_who_released_and_where_it_went_is_kept(paper: Any) -> None:
    rehearsal = Rehearsal(paper)
    replies = rehearsal.answer(rehearsal.ask(), release={1: (1, 1, 1), 3: (30, 30, 30)})
    rehearsal.end(replies)
    outcome = rehearsal.strategy.outcome
    assert outcome is not None
    assert outcome.round == 1
    releasing = np.flatnonzero(rehearsal.strategy.participations)
    np.testing.assert_array_equal(outcome.clients, releasing)
    assert len(outcome.groups) == len(releasing)
    assert outcome.releases is None, "releases of three parameters cannot be drawn in the plane"


def test_releases_that_are_too_few_go_nowhere(paper: Any) -> None:
    rehearsal = Rehearsal(paper)
    replies = rehearsal.answer(rehearsal.ask())
    rehearsal.strategy.min_releases = 9
    rehearsal.end(replies)
    outcome = rehearsal.strategy.outcome
    assert outcome is not None
    assert len(outcome.clients) == 4
    assert outcome.groups.tolist() == [-1] * 4


def test_combine_sees_each_group_by_itself(paper: Any) -> None:
    class Largest(Halves):
        def combine(self, group: NDArray[np.float64], hypothesis: NDArray[np.float64]) -> NDArray[np.float64]:
            return group.max(axis=0)

    rehearsal = Rehearsal(paper)
    rehearsal.strategy = Largest(clients_per_round=4)
    following, _ = rehearsal.end(rehearsal.answer(rehearsal.ask()))
    assert following == [[3, 0, 4], [9, 9, 13]]


def test_assign_sees_releases_in_client_order_and_what_was_broadcast(paper: Any) -> None:
    seen: dict[str, Any] = {}

    class Curious(Halves):
        def assign(self, releases: Any, hypotheses: Any, choices: Any) -> Any:
            seen.update(releases=releases.tolist(), hypotheses=hypotheses.tolist(), choices=choices)
            return super().assign(releases, hypotheses, choices)

    rehearsal = Rehearsal(paper, nodes=3)
    rehearsal.strategy = Curious(clients_per_round=4)
    rehearsal.end(rehearsal.answer(rehearsal.ask())[::-1])
    assert seen == {
        "releases": [list(RELEASE[client]) for client in range(4)],
        "hypotheses": [list(hypothesis) for hypothesis in HYPOTHESES_SENT],
        "choices": None,
    }


def test_clients_that_did_not_release_are_left_out(paper: Any) -> None:
    rehearsal = Rehearsal(paper)
    following, counts = rehearsal.end(rehearsal.answer(rehearsal.ask(), release={2: None}))
    assert following == [[1, 0, 2], [9, 9, 11]]
    assert counts == {"asked": 4, "releases": 3, "lost-nodes": 0, "groups": [1, 2]}


def test_a_node_that_answers_without_a_release_is_not_lost(paper: Any) -> None:
    rehearsal = Rehearsal(paper, nodes=2)
    # The second node hosts clients 1 and 3.
    following, counts = rehearsal.end(rehearsal.answer(rehearsal.ask(), release={1: None, 3: None}))
    assert following == [MEANS[0], [10, 10, 10]]
    assert (counts["releases"], counts["lost-nodes"]) == (2, 0)


@pytest.mark.parametrize(("released", "moved"), [(0, False), (1, False), (2, False), (3, True), (4, True)])
def test_fewer_releases_than_the_least_leave_the_hypotheses(paper: Any, released: int, moved: bool) -> None:
    rehearsal = Rehearsal(paper, nodes=4, min_releases=3)
    following, counts = rehearsal.end(rehearsal.answer(rehearsal.ask())[:released])
    assert (following is not None) == moved
    assert counts["releases"] == released
    assert sum(counts["groups"]) == (released if moved else 0)


def test_participations_are_counted_for_those_that_released(paper: Any) -> None:
    rehearsal = Rehearsal(paper, nodes=2)
    rehearsal.end(rehearsal.answer(rehearsal.ask(round=1)))
    assert rehearsal.strategy.participations.tolist() == [1, 1, 1, 1]
    rehearsal.end(rehearsal.answer(rehearsal.ask(round=2), release={2: None}))
    assert rehearsal.strategy.participations.tolist() == [2, 2, 1, 2]
    # The first node, with clients 0 and 2, is lost.
    rehearsal.end(rehearsal.answer(rehearsal.ask(round=3))[1:])
    assert rehearsal.strategy.participations.tolist() == [2, 3, 1, 3]


def test_participations_count_even_where_the_hypotheses_stay(paper: Any) -> None:
    rehearsal = Rehearsal(paper, nodes=2, min_releases=3)
    following, _ = rehearsal.end(rehearsal.answer(rehearsal.ask())[:1])
    assert following is None
    assert rehearsal.strategy.participations.tolist() == [1, 0, 1, 0]


def test_participations_are_those_of_the_sampled_clients(paper: Any) -> None:
    grid = paper.Grid.simulated(train=50, nodes=3)
    strategy = Halves(clients_per_round=5)
    messages = strategy.configure_train(1, to_array_record(paper.stack(HYPOTHESES_SENT)), ConfigRecord(COMMON), grid)
    asked = {client for message in messages for client in grid.asked(message)}
    strategy.aggregate_train(1, grid.releases(messages, lambda client: (client, 0, 0)))
    assert set(np.flatnonzero(strategy.participations).tolist()) == asked


# --- replies that are of no use


def npz(**arrays: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def weight(value: Any) -> Callable[[RecordDict], Any]:
    """Put another array in the place of a reply's weight."""
    array = value if isinstance(value, Array) else Array(np.asarray(value))
    return lambda content: content.array_records[ARRAYS].update(weight=array)


def flags(value: Any) -> Callable[[RecordDict], Any]:
    """Put another answer in the place of who released."""
    return lambda content: content.metric_records[COUNTS].update(released=value)


def serialised(data: bytes, stype: str = "numpy.ndarray") -> Array:
    return Array("float32", (2, 1, 2), stype, data)


TWO = np.ones((2, 1, 2), np.float32)
SPOILT: dict[str, Callable[[RecordDict], Any]] = {
    "no counts": lambda content: content.pop(COUNTS),
    "no arrays": lambda content: content.pop(ARRAYS),
    "arrays of another kind": lambda content: content.update({ARRAYS: MetricRecord()}),
    "nobody says who released": lambda content: content.metric_records[COUNTS].pop("released"),
    "flags for fewer": flags([1]),
    "flags for more": flags([1, 1, 1]),
    "one flag for all": flags(1),
    "a flag that is none": flags([1, 2]),
    "a negative flag": flags([1, -1]),
    "half a flag": flags([1.0, 0.5]),
    "more rows than flags": flags([1, 0]),
    "a row too few": weight(TWO[:1]),
    "a row too many": weight(np.ones((3, 1, 2), np.float32)),
    "another shape with as many numbers": weight(TWO.reshape(2, 2, 1)),
    "a number alone": weight(np.float32(1)),
    "a name too few": lambda content: content.array_records[ARRAYS].pop("bias"),
    "a name too many": lambda content: content.array_records[ARRAYS].update(extra=Array(TWO)),
    "another name": lambda content: content.update({ARRAYS: ArrayRecord({"w": Array(TWO), "bias": Array(TWO)})}),
    "not a number": weight(np.float32([[[1, np.nan]], [[1, 1]]])),
    "infinite": weight(np.float32([[[1, 1]], [[-np.inf, 1]]])),
    "finite in float64 alone": weight(TWO * np.float64(1e300)),
    "whole numbers": weight(TWO.astype(np.int64)),
    "complex": weight(TWO * 1j),
    "text": weight(TWO.astype(str)),
    "no bytes": weight(serialised(b"")),
    "bytes that end early": weight(serialised(Array(TWO).data[:-1])),
    "bytes that are no array": weight(serialised(b"umbel")),
    "another format": weight(serialised(Array(TWO).data, "torch.tensor")),
    "an archive of arrays": weight(serialised(npz(weight=TWO))),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_a_reply_that_does_not_fit_is_dropped(paper: Any, spoil: Callable[[RecordDict], Any]) -> None:
    rehearsal = Rehearsal(paper, nodes=2)
    replies = rehearsal.answer(rehearsal.ask())
    spoil(replies[1].content)
    following, counts = rehearsal.end(replies)
    # The other node hosts clients 0 and 2, both near hypothesis 0.
    assert following == [MEANS[0], [10, 10, 10]]
    assert counts == {"asked": 4, "releases": 2, "lost-nodes": 1, "groups": [2, 0]}
    assert rehearsal.strategy.participations.tolist() == [1, 0, 1, 0]


def test_the_order_of_names_in_a_reply_plays_no_part(paper: Any) -> None:
    rehearsal = Rehearsal(paper)
    (reply,) = replies = rehearsal.answer(rehearsal.ask())
    arrays = reply.content.array_records[ARRAYS]
    reply.content[ARRAYS] = ArrayRecord({name: arrays[name] for name in ("bias", "weight")})
    assert rehearsal.end(replies)[0] == MEANS


@pytest.mark.parametrize("case", ["error of the node", "error of Flower's own", "no reply"])
def test_a_node_without_an_answer_is_counted_as_lost(paper: Any, case: str) -> None:
    rehearsal = Rehearsal(paper, nodes=2)
    messages = rehearsal.ask()
    replies = rehearsal.answer(messages)[:1]
    if case != "no reply":
        source = paper.superlink if case == "error of Flower's own" else None
        replies.insert(0, paper.error_reply(messages[1], source))
    following, counts = rehearsal.end(replies)
    assert following == [MEANS[0], [10, 10, 10]]
    assert (counts["releases"], counts["lost-nodes"]) == (2, 1)


def test_when_all_nodes_are_lost_the_hypotheses_stay(paper: Any) -> None:
    rehearsal = Rehearsal(paper, nodes=2)
    following, counts = rehearsal.end([paper.error_reply(message) for message in rehearsal.ask()])
    assert following is None
    assert counts == {"asked": 4, "releases": 0, "lost-nodes": 2, "groups": [0, 0]}
    assert rehearsal.strategy.participations.tolist() == [0, 0, 0, 0]


def test_a_node_that_was_not_asked_is_not_heard(paper: Any) -> None:
    rehearsal = Rehearsal(paper, nodes=2)
    replies = rehearsal.answer(rehearsal.ask())
    stranger = Message(RecordDict(), 555, "train")
    replies.insert(0, Message(train_reply(paper.stack([(5, 5, 5)]), [1]), reply_to=stranger))
    following, counts = rehearsal.end(replies)
    assert following == MEANS
    assert (counts["releases"], counts["lost-nodes"]) == (4, 0)


def test_a_node_is_heard_once(paper: Any) -> None:
    rehearsal = Rehearsal(paper, nodes=2)
    messages = rehearsal.ask()
    again = rehearsal.answer(messages, release={0: (500, 500, 500)})[0]
    following, counts = rehearsal.end([*rehearsal.answer(messages), again])
    assert following == MEANS
    assert counts["releases"] == 4
    assert rehearsal.strategy.participations.tolist() == [1, 1, 1, 1]


# --- evaluation


def validate(
    paper: Any, nodes: int, clients: int = 4, per_round: int = 0, round: int = 1
) -> tuple[Halves, Any, list[Message]]:
    """Return a strategy that has asked validation clients, the grid and the messages."""
    grid = paper.Grid.simulated(train=2, validation=clients, nodes=nodes)
    strategy = Halves(clients_per_round=1, validation_clients_per_round=per_round)
    record = to_array_record(paper.stack(HYPOTHESES_SENT))
    return strategy, grid, strategy.configure_evaluate(round, record, ConfigRecord(), grid)


# Validation clients follow the two training clients.
LOSS = {2: 1.0, 3: 2.0, 4: 4.0, 5: 9.0}


def test_all_validation_clients_are_asked_by_one_message_a_node(paper: Any) -> None:
    _, grid, messages = validate(paper, nodes=3)
    assert [grid.asked(message) for message in messages] == [[3], [4], [2, 5]]
    assert {(m.metadata.message_type, m.metadata.group_id) for m in messages} == {("evaluate", "1")}
    np.testing.assert_array_equal(
        paper.vectors(from_array_record(messages[0].content.array_records[HYPOTHESES])), HYPOTHESES_SENT
    )


def test_some_validation_clients_are_sampled_anew_each_round(paper: Any) -> None:
    def asked(round: int, nodes: int) -> list[int]:
        _, grid, messages = validate(paper, nodes, clients=1000, per_round=5, round=round)
        return sorted(client for message in messages for client in grid.asked(message))

    assert len(set(asked(1, nodes=1))) == 5
    assert set(asked(1, nodes=1)) <= set(range(2, 1002))
    assert asked(1, nodes=1) == asked(1, nodes=3)
    assert asked(1, nodes=1) != asked(2, nodes=1)


def test_without_validation_clients_nobody_is_asked(paper: Any) -> None:
    strategy, _, messages = validate(paper, nodes=1, clients=0)
    assert messages == []
    assert strategy.aggregate_evaluate(1, []) is None


@pytest.mark.parametrize("nodes", [1, 2, 3, 6])
def test_every_validation_client_counts_once(paper: Any, nodes: int) -> None:
    strategy, grid, messages = validate(paper, nodes)
    scores = strategy.aggregate_evaluate(1, grid.scores(messages, LOSS.__getitem__)[::-1])
    assert scores == {"loss": 4.0, "metric": 40.0, "clients": 4}


def test_the_average_is_over_the_clients_that_answered(paper: Any) -> None:
    strategy, grid, messages = validate(paper, nodes=3)
    first, second, third = grid.scores(messages, LOSS.__getitem__)
    # The third node, with clients 2 and 5, is missing.
    assert strategy.aggregate_evaluate(1, [first, second]) == {"loss": 3.0, "metric": 30.0, "clients": 2}
    error = paper.error_reply(messages[0])
    assert strategy.aggregate_evaluate(1, [error, third, second])["clients"] == 3
    assert strategy.aggregate_evaluate(1, [error]) is None


def test_a_client_whose_loss_is_not_finite_is_left_out(paper: Any) -> None:
    strategy, grid, messages = validate(paper, nodes=1)
    replies = grid.scores(messages, (LOSS | {5: np.nan}).__getitem__)
    assert strategy.aggregate_evaluate(1, replies) == {"loss": 7 / 3, "metric": 70 / 3, "clients": 3}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content.pop(SCORES),
        lambda content: content.metric_records[SCORES].pop("metric"),
        lambda content: content.metric_records[SCORES].update(loss=1.0),
        lambda content: content.metric_records[SCORES].update(loss=[1.0]),
        lambda content: content.metric_records[SCORES].update(metric=[1.0, 1.0, 1.0]),
    ],
)
def test_scores_that_do_not_fit_are_dropped(paper: Any, spoil: Callable[[RecordDict], Any]) -> None:
    strategy, grid, messages = validate(paper, nodes=2)
    replies = grid.scores(messages, LOSS.__getitem__)
    spoil(replies[0].content)
    # The other node hosts clients 3 and 5.
    assert strategy.aggregate_evaluate(1, replies) == {"loss": 5.5, "metric": 55.0, "clients": 2}


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.randoms(use_true_random=False))
def test_no_bit_of_the_average_depends_on_nodes_or_order(
    paper: Any, seed: int, nodes: int, order: random.Random
) -> None:
    losses = np.random.default_rng(seed).normal(size=9)
    results = []
    for n in (1, nodes):
        strategy, grid, messages = validate(paper, n, clients=7)
        replies = grid.scores(messages, losses.__getitem__)
        order.shuffle(replies)
        results.append(strategy.aggregate_evaluate(1, replies))
    assert results[0] == results[1]


# --- radius


def test_the_radius_of_an_update_has_a_floor_that_stays() -> None:
    schedule = RadiusSchedule("update", floor=0.03, start=9.0, decay=0.5)
    assert [schedule.at(t) for t in (1, 2, 100)] == [0.03, 0.03, 0.03]


def test_a_public_radius_follows_its_schedule_down_to_the_floor() -> None:
    schedule = RadiusSchedule("public", floor=0.3, start=2.0, decay=0.5)
    assert [schedule.at(t) for t in (1, 2, 3, 4, 5)] == [2.0, 1.0, 0.5, 0.3, 0.3]


def test_a_public_radius_is_constant_unless_it_decays() -> None:
    assert RadiusSchedule("public", start=0.7).at(50) == 0.7


# --- in words


def test_the_summary_says_what_will_be_done(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        Halves(hypotheses=3, clients_per_round=12, radius=RadiusSchedule("public")).summary()
    assert caplog.messages == ["Halves: k = 3 hypotheses, 12 clients a round, radius public"]


# --- a strategy of one's own

NEWCOMER = '''
"""The median of each cluster, which a few bad releases cannot move."""
import numpy as np

from strategies.group_privacy import GroupPrivacy


class Median(GroupPrivacy):
    def combine(self, group, hypothesis):
        return np.median(group, axis=0)
'''


class Listening(InProcessGrid):
    """The in-process grid, with an ear on what comes back from training."""

    def pull_messages(self, message_ids: Any) -> list[Message]:
        replies = list(super().pull_messages(message_ids))
        self.trained = [reply for reply in replies if reply.metadata.message_type == "train"] or self.trained
        return replies

    trained: list[Message] = []  # noqa: RUF012


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a strategy in a file of ten lines, outside the app."""
    (tmp_path / "umbel_test_newcomer.py").write_text(NEWCOMER)
    monkeypatch.syspath_prepend(tmp_path)
    yield "umbel_test_newcomer:Median"
    sys.modules.pop("umbel_test_newcomer", None)


def test_a_newcomers_strategy_runs_from_its_import_path(
    newcomer: str, run_config: dict[str, Any], umbel_home: Path
) -> None:
    run_config |= {"strategy": newcomer, "hypotheses": 1, "rounds": 1, "clients-per-round": 5}
    grid = Listening(client.app.app, run_config, nodes=2)
    server.app.app(grid, Context(1, 1, {}, RecordDict(), run_config))

    (folder,) = (umbel_home / "runs").iterdir()
    releases = np.concatenate([flatten(from_array_record(r.content.array_records[ARRAYS])) for r in grid.trained])
    assert releases.shape == (5, 2)
    latest = flatten(safetensors.numpy.load_file(folder / "latest.safetensors"))
    np.testing.assert_array_equal(latest[0], np.median(releases, axis=0).astype(np.float32))


def test_flowers_own_start_runs_a_strategy(newcomer: str, run_config: dict[str, Any], umbel_home: Path) -> None:
    run_config |= {"strategy": newcomer, "rounds": 3, "restarts": 1, "seed": 4}
    grid = InProcessGrid(client.app.app, run_config, nodes=2)
    server.app.app(grid, Context(1, 1, {}, RecordDict(), run_config))
    (folder,) = (umbel_home / "runs").iterdir()
    by_umbel = safetensors.numpy.load_file(folder / "latest.safetensors")

    settings = Settings.parse(run_config)
    start = to_array_record(draw_hypotheses(settings.model, settings.strategy.hypotheses, seed=4, restart=0))
    grid = InProcessGrid(client.app.app, run_config, nodes=2)
    result = settings.strategy.start(grid, start, num_rounds=3, train_config=settings.train_config)
    np.testing.assert_array_equal(from_array_record(result.arrays)["weight"], by_umbel["weight"])
    assert [result.train_metrics_clientapp[t]["releases"] for t in (1, 2, 3)] == [7, 7, 7]
    assert [result.evaluate_metrics_clientapp[t]["clients"] for t in (1, 2, 3)] == [100, 100, 100]


def test_start_goes_on_over_a_round_without_releases(run_config: dict[str, Any]) -> None:
    def refuse_training_in_round_2(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and message.metadata.group_id == "2":
            raise RuntimeError("the power went")
        return client.app.app(message, context)

    settings = Settings.parse(run_config)
    start = to_array_record(draw_hypotheses(settings.model, 2, seed=0, restart=0))
    grid = InProcessGrid(refuse_training_in_round_2, run_config, nodes=2)
    result = GroupPrivacy().start(grid, start, num_rounds=3, train_config=settings.train_config)
    assert [result.train_metrics_clientapp[t]["releases"] for t in (1, 2, 3)] == [7, 0, 7]
    assert [result.train_metrics_clientapp[t]["lost-nodes"] for t in (1, 2, 3)] == [0, 2, 0]
