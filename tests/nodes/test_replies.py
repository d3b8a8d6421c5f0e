"""What nodes answered: in client order, each heard once, and whatever does not fit is dropped."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.helpers.grids import SUPERLINK, PaperGrid, error_reply, stack
from tests.helpers.hostile import UNREADABLE, matrix
from tests.helpers.paper import paper_task
from tests.helpers.replies import evaluation_reply, training_reply
from umbel.nodes.fleet import Fleet
from umbel.privacy.channels import load
from umbel.protocol.arrays import Arrays
from umbel.protocol.asked import Asked
from umbel.protocol.hypotheses import Hypotheses
from umbel.protocol.records import in_steps, pack, unpack
from umbel.protocol.releases import Releases, Scores
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

RECORD = Hypotheses(stack([(0, 0, 0), (10, 10, 10)]))
TASK = paper_task()
RELEASE = {0: (1, 0, 2), 1: (9, 9, 9), 2: (3, 0, 4), 3: (9, 9, 13)}
# Validation clients follow two training clients.
LOSS = {2: 1.0, 3: 2.0, 4: 4.0, 5: 9.0}


class Round:
    """A round on paper: who was asked, and what is read of the replies."""

    def __init__(self, fleet: Fleet, asked: Asked) -> None:
        self.fleet, self.asked = fleet, asked

    def read(self, replies: Iterable[Message]) -> Any:
        return self.fleet.read(self.asked, replies)


def scores_of(asked: Asked, *replies: Message) -> Scores:
    found = load("reports")(Fleet()).read(asked, replies)
    assert isinstance(found, Scores)
    return found


def training(nodes: int = 1, clients: int = 4, task: TrainingSpec = TASK) -> tuple[Round, PaperGrid, list[Message]]:
    """Return a round that asks all training clients, its grid and the messages."""
    grid, fleet = PaperGrid.simulated(train=clients, nodes=nodes), Fleet(clients_per_round=clients)
    asked = fleet.ask_training(1, RECORD, task, grid)
    return Round(fleet, asked), grid, asked.messages


def validation(nodes: int = 1, clients: int = 4, **run: Any) -> tuple[Round, PaperGrid, list[Message]]:
    """The same of validation clients."""
    grid, fleet = PaperGrid.simulated(train=2, validation=clients, nodes=nodes), Fleet(clients_per_round=1, **run)
    asked = fleet.ask_evaluation(1, RECORD, EvaluationSpec(), grid)
    return Round(fleet, asked), grid, asked.messages


def says(node: int, content: RecordDict) -> Message:
    return Message(content, reply_to=Message(RecordDict(), node, "evaluate"))


def told(releases: Releases) -> dict[int, list[float]]:
    """Return the releases by client, and check that they are in client order."""
    clients = releases.clients.tolist()
    assert clients == sorted(set(clients))
    assert releases.vectors.shape == (len(clients), 3)
    return dict(zip(clients, releases.vectors.tolist(), strict=True))


def expected(*clients: int) -> dict[int, list[float]]:
    return {client: list(RELEASE[client]) for client in clients}


# --- releases


@pytest.mark.parametrize("nodes", [1, 3])
def test_releases_are_in_client_order_whatever_the_nodes(nodes: int) -> None:
    asked, grid, messages = training(nodes)
    releases = asked.read(grid.releases(messages, RELEASE.__getitem__)[::-1])
    assert told(releases) == expected(0, 1, 2, 3)
    assert (releases.asked, releases.lost_nodes, releases.choices) == (4, 0, None)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_strategy_cannot_write_into_what_came(nodes: int) -> None:
    """It would move what is computed from the releases after it, or with one node, whose reply holds them, fail."""
    asked, grid, messages = training(nodes)
    vectors = asked.read(grid.releases(messages, RELEASE.__getitem__)).vectors
    with pytest.raises(ValueError, match="read-only"):
        vectors -= 1


def test_participations_are_counted_for_those_that_released() -> None:
    asked, grid, messages = training(nodes=2)
    asked.read(grid.releases(messages, RELEASE.__getitem__))
    assert asked.fleet.participations.tolist() == [1, 1, 1, 1]
    releases = asked.read(grid.releases(messages, (RELEASE | {1: None, 3: None}).__getitem__))
    assert told(releases) == expected(0, 2)
    assert releases.lost_nodes == 0, "a node that answers without a release is not lost"
    assert asked.fleet.participations.tolist() == [2, 1, 2, 1]
    # The first node, with clients 0 and 2, is lost.
    asked.read(grid.releases(messages, RELEASE.__getitem__)[1:])
    assert asked.fleet.participations.tolist() == [2, 2, 2, 2]


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.randoms(use_true_random=False))
def test_neither_the_number_of_nodes_nor_the_order_of_replies_changes_a_bit(
    seed: int, nodes: int, order: random.Random
) -> None:
    generator = np.random.default_rng(seed)
    release = dict(enumerate(generator.normal(5, 5, size=(7, 3)).tolist()))
    results = []
    for n in (1, nodes):
        asked, grid, messages = training(n, clients=7)
        replies = grid.releases(messages, release.__getitem__)
        order.shuffle(replies)
        results.append(asked.read(replies).vectors.tobytes())
    assert results[0] == results[1]


def test_the_order_of_names_in_a_reply_plays_no_part() -> None:
    asked, grid, messages = training()
    (reply,) = replies = grid.releases(messages, RELEASE.__getitem__)
    arrays = unpack(reply.content.array_records["arrays"])
    reply.content["arrays"] = pack({name: arrays[name] for name in ("bias", "weight")})
    assert told(asked.read(replies)) == expected(0, 1, 2, 3)


# --- what clients chose


def disclosed(choices: Any, nodes: int = 1) -> Releases:
    """Return what is read of clients that were asked what they chose, and of which the last node says `choices`."""
    asked, grid, messages = training(nodes, task=replace(TASK, disclose_choice=True))
    replies = grid.releases(messages, RELEASE.__getitem__, lambda client: client % 2)
    counts = replies[-1].content.metric_records["released"]
    if choices is None:
        del counts["choices"]
    else:
        counts["choices"] = choices
    return asked.read(replies)


def test_choices_are_in_client_order() -> None:
    assert disclosed([0, 1, 1, 0]).choices.tolist() == [0, 1, 1, 0]
    # The node of clients 0 and 2 says that these chose 0, the other says 1 for client 1 and 0 for client 3.
    assert disclosed([1, 0], nodes=2).choices.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "choices",
    [None, 1, [0], [0, 1, 0], [0, 2], [0, -1], [0.0, 0.5], [0.0, float("inf")], [0.0, float("nan")], [0, 2**70]],
)
def test_a_reply_without_a_choice_for_each_release_is_dropped(choices: Any) -> None:
    releases = disclosed(choices, nodes=2)
    assert told(releases) == expected(0, 2)
    assert releases.choices.tolist() == [0, 0]
    assert releases.lost_nodes == 1


# --- releases in steps of a grid


@pytest.mark.parametrize("nodes", [1, 2])
def test_releases_that_came_as_steps_are_the_same(nodes: int) -> None:
    asked, grid, messages = training(nodes)
    replies = grid.releases(messages, RELEASE.__getitem__)
    for reply in replies:
        in_steps_of(reply.content, 2.0**-8)
    assert told(asked.read(replies)) == expected(0, 1, 2, 3)


@pytest.mark.parametrize("step", [0.3, 2.0**127])
def test_a_reply_with_a_step_that_makes_no_release_is_dropped(step: Any) -> None:
    asked, grid, messages = training(2)
    first, second = grid.releases(messages, RELEASE.__getitem__)
    in_steps_of(second.content, 2.0**-8)
    second.content.metric_records["released"]["step"] = step
    releases = asked.read([first, second])
    assert told(releases) == expected(0, 2)
    assert releases.lost_nodes == 1 or releases.outside.tolist() == [1, 3]


def in_steps_of(content: RecordDict, step: float) -> None:
    """Have a reply's releases travel as steps of a grid."""
    content["arrays"] = pack(in_steps(unpack(content.array_records["arrays"]), step))
    content.metric_records["released"]["step"] = step


# --- replies that are of no use


def changed(change: Callable[[Arrays], Mapping[str, Any]]) -> Callable[[RecordDict], Any]:
    """Put other arrays in the place of a reply's."""
    return lambda content: content.update({"arrays": pack(change(unpack(content.array_records["arrays"])))})


def weight(value: NDArray[Any]) -> Callable[[RecordDict], Any]:
    """Put another array in the place of a reply's weight."""
    return changed(lambda arrays: arrays | {"weight": value})


def flags(value: Any) -> Callable[[RecordDict], Any]:
    """Put another answer in the place of who released."""
    return lambda content: content.metric_records["released"].update(clients=value)


SPOILT: dict[str, Callable[[RecordDict], Any]] = {
    "nothing of training": lambda content: content.pop("released"),
    "no arrays": lambda content: content.pop("arrays"),
    "flags of another kind": lambda content: content.update({"released": content["arrays"]}),
    "nobody says who released": lambda content: content.metric_records["released"].pop("clients"),
    "flags for fewer": flags([1]),
    "a flag that is none": flags([1, 2]),
    "more rows than flags": flags([1, 0]),
    "a row too few": changed(lambda arrays: {name: value[:1] for name, value in arrays.items()}),
    "another shape with as many numbers": weight(np.ones((2, 2, 1), np.float32)),
    "a name too few": changed(lambda arrays: {"weight": arrays["weight"]}),
    "another name": changed(lambda arrays: {"w": arrays["weight"], "bias": arrays["bias"]}),
    "not a number": weight(np.float32([[[1, np.nan]], [[1, 1]]])),
    "infinite": weight(np.float32([[[1, 1]], [[-np.inf, 1]]])),
    "finite in float64 alone": changed(
        lambda arrays: {name: value * np.float64(1e300) for name, value in arrays.items()}
    ),
    "whole numbers": changed(lambda arrays: {name: value.astype(np.int64) for name, value in arrays.items()}),
    "bytes of no array": lambda content: content.update({"arrays": matrix(UNREADABLE["an array cut short"])}),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_a_reply_that_does_not_fit_is_dropped(spoil: Callable[[RecordDict], Any]) -> None:
    asked, grid, messages = training(nodes=2)
    replies = grid.releases(messages, RELEASE.__getitem__)
    spoil(replies[1].content)
    releases = asked.read(replies)
    # The other node hosts clients 0 and 2.
    assert told(releases) == expected(0, 2)
    assert (releases.asked, releases.lost_nodes) == (4, 1)
    assert asked.fleet.participations.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("source", [None, SUPERLINK])
def test_a_node_without_an_answer_is_counted_as_lost(source: int | None) -> None:
    asked, grid, messages = training(nodes=2)
    replies = grid.releases(messages, RELEASE.__getitem__)[:1]
    assert asked.read(replies).lost_nodes == 1
    releases = asked.read([error_reply(messages[1], source), *replies])
    assert told(releases) == expected(0, 2)
    assert releases.lost_nodes == 1


def test_a_node_is_heard_once_and_only_if_it_was_asked() -> None:
    asked, grid, messages = training(nodes=2)
    again = grid.releases(messages, (RELEASE | {0: (500, 500, 500)}).__getitem__)[0]
    stranger = Message(training_reply(stack([(5, 5, 5)]), [1]), reply_to=Message(RecordDict(), 555, "train"))
    releases = asked.read([stranger, *grid.releases(messages, RELEASE.__getitem__), again])
    assert told(releases) == expected(0, 1, 2, 3)
    assert releases.lost_nodes == 0
    assert asked.fleet.participations.tolist() == [1, 1, 1, 1]


def test_of_no_answer_at_all_there_are_releases_of_nobody() -> None:
    task, one = replace(TASK, disclose_choice=True), Hypotheses(stack([(0, 0, 0)]))
    releases = load("client")(Fleet()).read(Asked(one, np.array([0, 2]), {7: np.array([0, 1])}, task=task), [])
    assert told(releases) == {}
    assert releases.choices is not None
    assert (len(releases.choices), releases.lost_nodes) == (0, 1)


# --- releases too far from what was sent


@pytest.mark.parametrize("disclose", [False, True])
def test_a_release_that_no_honest_client_would_send_is_left_out_and_counted(
    disclose: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of clients 0 and 2 on one node and 1 and 3 on the other, client 3 has nothing in mind but the mean."""
    asked, grid, messages = training(2, task=replace(TASK, disclose_choice=disclose))
    choices = {"choice_of": lambda client: client % 2} if disclose else {}
    releases = asked.read(grid.releases(messages, (RELEASE | {3: (3.4e38, 0, 0)}).__getitem__, **choices))
    assert told(releases) == expected(0, 1, 2)
    assert (releases.asked, releases.lost_nodes, releases.outside.tolist()) == (4, 0, [3])
    assert (None if releases.choices is None else releases.choices.tolist()) == ([0, 1, 0] if disclose else None)
    assert asked.fleet.participations.tolist() == [1, 1, 1, 1], "it has paid as well"
    assert asked.fleet.dropped == 1
    assert "left out 1 of 2 releases of node 101, further than" in caplog.text
    asked.fleet.exchange(2, grid, [], timeout=1)
    assert asked.fleet.dropped == 0, "in the round after it"


def test_how_far_a_release_may_lie_is_the_runs() -> None:
    grid, fleet = PaperGrid.simulated(train=4), Fleet(clients_per_round=4, per_node="update-norm=1.5")
    asked = Round(fleet, fleet.ask_training(1, RECORD, replace(TASK, noise_multiplier=0.0), grid))
    release = {0: (0, 0, 0), 1: (1.4, 0, 0), 2: (1.6, 0, 0), 3: (10, 10, 11)}
    assert asked.read(grid.releases(asked.asked.messages, release.__getitem__)).clients.tolist() == [0, 1, 3]
    public = replace(TASK, noise_multiplier=0.0, clipping="public", clip_norm=1.0)
    strict, grid, messages = training(task=public)
    assert strict.read(grid.releases(messages, release.__getitem__)).clients.tolist() == [0, 3]


# --- scores


@pytest.mark.parametrize(
    ("nodes", "by", "loss", "expected"),
    [
        (1, "mean", LOSS, Scores(4.0, 40.0, 4)),
        (3, "mean", LOSS, Scores(4.0, 40.0, 4)),
        (1, "median", LOSS, Scores(3.0, 30.0, 4)),
        (1, "mean", LOSS | {5: np.nan}, Scores(7 / 3, 70 / 3, 3)),
    ],
    ids=["one node", "three nodes", "the median", "a loss that is no number is left out"],
)
def test_every_validation_client_counts_once(nodes: int, by: str, loss: dict[int, float], expected: Scores) -> None:
    asked, grid, messages = validation(nodes, validation=f"by={by}")
    assert asked.read(grid.scores(messages, loss.__getitem__)[::-1]) == expected


def test_the_average_is_over_the_clients_that_answered() -> None:
    asked, grid, messages = validation(nodes=3)
    first, second, third = grid.scores(messages, LOSS.__getitem__)
    # The third node, with clients 2 and 5, is missing.
    assert asked.read([first, second]) == Scores(3.0, 30.0, 2)
    error = error_reply(messages[0])
    assert asked.read([error, third, second]).clients == 3
    assert asked.read([error]) is None


@pytest.mark.parametrize("odd", [np.inf, 1e39, 1.7e308])
def test_a_loss_that_no_model_has_counts_as_the_largest_that_one_has(odd: float) -> None:
    """One of 1.7e308 would carry the mean of all to infinity."""
    asked, grid, messages = validation()
    for sign in (1, -1):
        found, largest = (
            asked.read(grid.scores(messages, (LOSS | {5: sign * loss}).__getitem__))
            for loss in (odd, float(np.finfo(np.float32).max))
        )
        assert found == largest
        assert found.clients == 4


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.randoms(use_true_random=False))
def test_no_bit_of_the_average_depends_on_nodes_or_order(seed: int, nodes: int, order: random.Random) -> None:
    losses = np.random.default_rng(seed).normal(size=9)
    results = []
    for n in (1, nodes):
        asked, grid, messages = validation(n, clients=7)
        replies = grid.scores(messages, losses.__getitem__)
        order.shuffle(replies)
        results.append(asked.read(replies))
    assert results[0] == results[1]


# --- one reply for both


def test_how_clients_differ_is_told_by_what_they_reported() -> None:
    """Of eleven clients the quantiles are the second, the third (from 2.5), the middle one, and so on."""
    losses = np.array([7.0, 0, 1, 2, 3, 4, 5, 6, 8, 9, 100])
    asked = Asked(RECORD, np.arange(11), {7: np.arange(11)})
    reply = says(7, evaluation_reply(losses, 10 * losses))
    found = scores_of(asked, reply)
    assert found.loss_spread == [1, 2, 5, 8, 9]
    assert found.metric_spread == [10, 20, 50, 80, 90]


def test_the_noise_of_reports_is_that_of_a_sites_mean_once_and_of_clients_each() -> None:
    """Vector Laplace noise of 2 components at nu = 2 and radius sqrt(2) / 2 has deviation sqrt(3) / sqrt(2) each."""
    asked = Asked(RECORD, np.arange(10), {7: np.arange(6), 8: np.arange(6, 10)})
    mean = says(7, evaluation_reply(np.full(6, 0.4), np.full(6, 0.5), 2.0, 0.5))
    each = says(8, evaluation_reply(np.array([0.1, 0.2, 0.3, 0.4]), np.full(4, 0.5), 2.0, 0.5))
    found = scores_of(asked, mean, each)
    assert found.bound == 0.5
    assert found.noise == pytest.approx(math.sqrt((1 + 4) * 3 / 2) / 10)
    exact = scores_of(asked, says(7, evaluation_reply(np.full(6, 0.4), np.full(6, 0.5))))
    assert (exact.noise, exact.bound) == (0, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e300])
def test_a_noise_or_a_bound_that_no_site_has_counts_as_none(bad: float) -> None:
    asked = Asked(RECORD, np.arange(2), {7: np.arange(2)})
    found = scores_of(asked, says(7, evaluation_reply(np.ones(2), np.ones(2), 2.0, bad)))
    assert (found.noise, found.bound) == (0, 0)


def test_a_reply_may_hold_releases_and_scores() -> None:
    """Each part is read as if it came alone, and one that is spoilt takes nothing from the other."""
    grid, fleet = PaperGrid.simulated(train=4, validation=2), Fleet(clients_per_round=4)
    trained = Round(fleet, fleet.ask_training(1, RECORD, TASK, grid))
    reported = Round(fleet, fleet.ask_evaluation(1, RECORD, EvaluationSpec(), grid))
    (message,) = trained.asked.messages
    (reply,) = grid.releases([message], RELEASE.__getitem__)
    reply.content.update(evaluation_reply(np.array([1.0, 3.0]), np.array([2.0, 4.0])))
    assert told(trained.read([reply])) == expected(0, 1, 2, 3)
    assert reported.read([reply]) == Scores(2.0, 3.0, 2)
    spoilt = reply.content.pop("arrays")
    assert trained.read([reply]).lost_nodes == 1
    assert reported.read([reply]) == Scores(2.0, 3.0, 2)
    reply.content["arrays"] = spoilt
    reply.content.pop("scores")
    assert told(trained.read([reply])) == expected(0, 1, 2, 3)
    assert reported.read([reply]) is None


@pytest.mark.parametrize(("lie", "held"), [(3e37, 1.0), (-3e37, 0.0), (0.25, 0.25)])
def test_a_metric_that_is_a_share_counts_as_one_from_0_to_1(lie: float, held: float) -> None:
    """The same lie about a loss, of which nobody knows the range, counts as ten times the others."""
    asked, grid, messages = validation(clients=4)
    (message,) = messages
    (reply,) = grid.scores([message], lambda _: 0.5)
    reply.content.update(evaluation_reply(np.full(4, 0.5), np.array([0.5, 0.5, 0.5, lie])))
    asked.fleet.metric_is_share = True
    scores = asked.read([reply])
    assert scores.metric == (1.5 + held) / 4
    assert 0 <= min(scores.metric_spread) <= max(scores.metric_spread) <= 1
