"""What travels is checked on arrival, and survives Flower's own serialisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.errors import raises
from tests.helpers.records import STACKED, assert_same_arrays, over_the_wire
from tests.helpers.tasks import EVALUATION, TRAINING, evaluations, request, trainings
from umbel.protocol.errors import ProtocolError
from umbel.protocol.messages import (
    answers_training,
    evaluation_in,
    evaluation_reply,
    hypotheses_in,
    keep_request,
    merged,
    number_released,
    numbers_asked,
    query,
    released_in,
    scores_in,
    training_in,
    training_reply,
    version_in,
)
from umbel.protocol.records import pack
from umbel.protocol.tasks import VERSION, EvaluationSpec, TrainingSpec


@given(st.one_of(st.none(), trainings), st.one_of(st.none(), evaluations))
def test_a_round_arrives_as_it_was_sent(training: TrainingSpec | None, evaluation: EvaluationSpec | None) -> None:
    arrived = over_the_wire(request(training, evaluation))
    assert (training_in(arrived), evaluation_in(arrived)) == (training, evaluation)
    assert numbers_asked(arrived) == tuple(len(task.clients) if task else 0 for task in (training, evaluation))
    assert_same_arrays(hypotheses_in(arrived), STACKED)


@pytest.mark.parametrize("name", ["training", "evaluation"])
def test_what_is_asked_comes_in_a_record_of_its_kind_with_hypotheses(name: str) -> None:
    content = RecordDict({name: MetricRecord({"round": 1})})
    with raises(ProtocolError, "protocol.records", name):
        (training_in if name == "training" else evaluation_in)(content)
    with raises(ProtocolError, "protocol.records", "hypotheses"):
        hypotheses_in(content)


def to(node: int, content: RecordDict) -> Message:
    """Return a message to a node."""
    return Message(content, node, "train", group_id="3")


def test_messages_to_one_node_become_one() -> None:
    training, evaluation = to(7, request(TRAINING)), to(7, request(evaluation=EVALUATION))
    alone = to(8, request(evaluation=EVALUATION))
    both, other = merged([training, evaluation, alone])
    assert (both.metadata.dst_node_id, other.metadata.dst_node_id) == (7, 8)
    assert (training_in(both.content), evaluation_in(both.content)) == (TRAINING, EVALUATION)
    assert (training_in(other.content), evaluation_in(other.content)) == (None, EVALUATION)
    assert_same_arrays(hypotheses_in(both.content), STACKED)


def test_of_what_two_messages_ask_alike_the_first_stands() -> None:
    first, second = request(TRAINING), request(TrainingSpec(9, (1,), 1, 0.1, 10, 5.0))
    (one,) = merged([to(7, first), to(7, second)])
    assert training_in(one.content) == TRAINING


def test_what_a_run_has_found_travels_by_itself() -> None:
    arrived = over_the_wire(keep_request(pack(STACKED)))
    assert numbers_asked(arrived) == (0, 0)
    assert_same_arrays(hypotheses_in(arrived), STACKED)


def test_a_query_asks_for_the_version_spoken_here_or_names_none() -> None:
    assert version_in(over_the_wire(query())) == VERSION == 1
    assert version_in(RecordDict({"version": ConfigRecord()})) is None
    with raises(ProtocolError, "protocol.records", "version"):
        version_in(RecordDict())


@pytest.mark.parametrize(("choices", "names"), [(None, {"clients"}), ([1, 0], {"clients", "choices"})])
def test_a_reply_to_training_holds_releases_and_public_flags_alone(choices: list[int] | None, names: set[str]) -> None:
    arrived = over_the_wire(training_reply(STACKED, [1, 0, 1], choices))
    assert set(arrived) == {"arrays", "released"}
    assert set(arrived.metric_records["released"]) == names
    arrays, flags, told = released_in(arrived, 3)
    assert_same_arrays(arrays, STACKED)
    assert flags.tolist() == [True, False, True]
    assert (None if told is None else told.tolist()) == choices
    assert answers_training(arrived)
    assert number_released(arrived, 3) == 2
    assert number_released(arrived, 2) == 0, "of two that were asked, three cannot say"


def test_a_node_may_answer_that_nobody_released() -> None:
    nothing = {name: value[:0] for name, value in STACKED.items()}
    arrays, flags, choices = released_in(over_the_wire(training_reply(nothing, [0, 0], [])), 2)
    assert {name: value.shape for name, value in arrays.items()} == {"weight": (0, 2, 2), "bias": (0, 1)}
    assert not flags.any()
    assert choices is not None
    assert choices.shape == (0,)


@pytest.mark.parametrize("flags", [[1, 0], [1, 0, 1, 1], [1, 0, 2], [1.0, 0.0, 0.5], [1.0, 0.0, float("nan")], []])
def test_flags_that_do_not_say_who_released_are_refused(flags: list[Any]) -> None:
    with raises(ProtocolError, "protocol.released"):
        released_in(training_reply(STACKED, flags), 3)


@pytest.mark.parametrize(
    ("told", "code"), [({}, "released"), ({"clients": [1, 0, 1], "choices": [0.5, 1.0]}, "choices")]
)
def test_a_reply_without_flags_or_with_choices_that_are_no_whole_numbers_is_refused(told: Any, code: str) -> None:
    content = training_reply(STACKED, [1, 0, 1])
    content["released"] = MetricRecord(told)
    with raises(ProtocolError, f"protocol.{code}"):
        released_in(content, 3)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"released": ConfigRecord({"clients": [1, 1]})}),
        RecordDict({"released": MetricRecord()}),
        RecordDict({"released": MetricRecord({"clients": 1})}),
        RecordDict({"released": MetricRecord({"clients": [1, 1]})}),
        RecordDict({"released": MetricRecord({"clients": [1, 1]}), "arrays": ArrayRecord()}),
        RecordDict({"released": MetricRecord({"clients": [1] * 1000}), "arrays": pack(STACKED)}),
        RecordDict({"released": MetricRecord({"clients": [1, 2]}), "arrays": pack(STACKED)}),
    ],
)
def test_of_a_reply_that_says_something_else_nobody_is_counted(content: RecordDict) -> None:
    """Else one node could fill the quorum by itself."""
    assert number_released(content, 2) == 0


def test_a_reply_without_the_record_does_not_answer_training() -> None:
    assert not answers_training(RecordDict({"arrays": ArrayRecord()}))
    with raises(ProtocolError, "protocol.records", "released"):
        released_in(RecordDict({"arrays": ArrayRecord()}), 1)


def test_scores_arrive_in_order_even_if_they_are_no_numbers() -> None:
    losses, metrics = np.array([0.5, np.nan, np.inf]), np.array([1, 0, 0.25], np.float32)
    scores = scores_in(over_the_wire(evaluation_reply(losses, metrics)), 3)
    np.testing.assert_array_equal(scores, [[0.5, np.nan, np.inf], [1, 0, 0.25]])


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"scores": ConfigRecord({"loss": [1.0], "metric": [1.0]})}),
        RecordDict({"scores": MetricRecord({"loss": [1.0]})}),
        RecordDict({"scores": MetricRecord({"loss": [1.0, 2.0], "metric": [1.0]})}),
        RecordDict({"scores": MetricRecord({"loss": 1.0, "metric": 1.0})}),
    ],
)
def test_scores_that_do_not_fit_are_none(content: RecordDict) -> None:
    assert scores_in(content, 1) is None
