"""What a channel writes at a site is checked on arrival, and survives Flower's own serialisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from tests.helpers.errors import raises
from tests.helpers.messages import task_of
from tests.helpers.records import STACKED, assert_same_arrays, over_the_wire
from tests.helpers.replies import evaluation_reply, training_reply
from umbel.privacy.channels import answers_training
from umbel.privacy.channels.client import Client, released_in
from umbel.privacy.channels.reports import scores_in
from umbel.protocol.errors import ProtocolError
from umbel.protocol.records import pack
from umbel.protocol.tasks import TrainingSpec


def asking(clients: int) -> TrainingSpec:
    return task_of(tuple(range(clients)))


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
    assert Client.answered(asking(3), arrived) == 2
    assert Client.answered(asking(2), arrived) == 0, "of two that were asked, three cannot say"


def test_a_node_may_answer_that_nobody_released() -> None:
    nothing = {name: value[:0] for name, value in STACKED.items()}
    arrays, flags, choices = released_in(over_the_wire(training_reply(nothing, [0, 0], [])), 2)
    assert {name: value.shape for name, value in arrays.items()} == {"weight": (0, 2, 2), "bias": (0, 1)}
    assert not flags.any()
    assert choices is not None
    assert choices.shape == (0,)


def test_scores_arrive_in_order_even_if_they_are_no_numbers() -> None:
    losses, metrics = np.array([0.5, np.nan, np.inf]), np.array([1, 0, 0.25], np.float32)
    scores = scores_in(over_the_wire(evaluation_reply(losses, metrics)), 3)
    np.testing.assert_array_equal(scores, [[0.5, np.nan, np.inf], [1, 0, 0.25]])


@pytest.mark.parametrize(
    ("said", "code"),
    [
        *(({"clients": flags}, "released") for flags in ([1, 0], [1, 0, 1, 1], [1, 0, 2], [1.0, 0.0, 0.5], [])),
        ({"clients": [1.0, 0.0, float("nan")]}, "released"),
        ({"clients": 1}, "released"),
        ({}, "released"),
        ({"clients": [1, 0, 1], "choices": [0.5, 1.0]}, "choices"),
        (None, "records"),
    ],
)
def test_a_reply_that_does_not_say_who_released_is_refused(said: Any, code: str) -> None:
    content = RecordDict({"arrays": pack(STACKED)} | ({} if said is None else {"released": MetricRecord(said)}))
    assert answers_training(content) is (said is not None)
    with raises(ProtocolError, f"protocol.{code}"):
        released_in(content, 3)


@pytest.mark.parametrize(
    "released",
    [None, ConfigRecord({"clients": [1, 1]}), *(MetricRecord({"clients": who}) for who in (1, [1] * 1000, [1, 2]))],
)
def test_of_a_reply_that_says_something_else_nobody_is_counted(released: Any) -> None:
    """Else one node could fill the quorum by itself."""
    content = RecordDict({"arrays": pack(STACKED)} | ({} if released is None else {"released": released}))
    assert Client.answered(asking(2), content) == 0


@pytest.mark.parametrize(
    "scores",
    [
        None,
        ConfigRecord({"loss": [1.0], "metric": [1.0]}),
        *(MetricRecord(said) for said in ({"loss": [1.0]}, {"loss": [1.0, 2.0], "metric": [1.0]})),
        MetricRecord({"loss": 1.0, "metric": 1.0}),
    ],
)
def test_scores_that_do_not_fit_are_none(scores: Any) -> None:
    assert scores_in(RecordDict({} if scores is None else {"scores": scores}), 1) is None
