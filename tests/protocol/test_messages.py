"""What travels is checked on arrival, and survives Flower's own serialisation."""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.errors import raises
from tests.helpers.records import STACKED, assert_same_arrays, over_the_wire
from tests.helpers.tasks import EVALUATION, TRAINING, evaluations, request, trainings
from umbel.protocol.errors import ProtocolError
from umbel.protocol.messages import (
    evaluation_in,
    hypotheses_in,
    keep_request,
    merged,
    numbers_asked,
    query,
    training_in,
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
    # What a run has found travels by itself.
    arrived = over_the_wire(keep_request(pack(STACKED)))
    assert numbers_asked(arrived) == (0, 0)
    assert_same_arrays(hypotheses_in(arrived), STACKED)


def test_messages_to_one_node_become_one() -> None:
    def to(node: int, content: RecordDict) -> Message:
        return Message(content, node, "train", group_id="3")

    alike = TrainingSpec(9, (1,), 1, 0.1, 10, 5.0)  # of what two messages ask alike the first stands
    asked = [request(TRAINING), request(alike), request(evaluation=EVALUATION)]
    both, other = merged([*(to(7, one) for one in asked), to(8, request(evaluation=EVALUATION))])
    assert (both.metadata.dst_node_id, other.metadata.dst_node_id) == (7, 8)
    assert (training_in(both.content), evaluation_in(both.content)) == (TRAINING, EVALUATION)
    assert (training_in(other.content), evaluation_in(other.content)) == (None, EVALUATION)
    assert_same_arrays(hypotheses_in(both.content), STACKED)


def test_a_query_asks_for_the_version_spoken_here_or_names_none() -> None:
    assert version_in(over_the_wire(query())) == VERSION == 1
    assert version_in(RecordDict({"version": ConfigRecord()})) is None
    with raises(ProtocolError, "protocol.records", "version"):
        version_in(RecordDict())
