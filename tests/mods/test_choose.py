"""`umbel.ChooseHypothesis`: which model a function sees, and that nothing but the app's own reply leaves.

Statistical tests draw from the operating system's entropy, with a false-alarm rate of at most 1e-6 each.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from scipy import stats

import umbel
from tests.helpers.errors import raises
from tests.helpers.flower_apps import SECRET, arrays, asks, fails
from tests.helpers.messages import wire
from tests.helpers.mods import answer, context, message, moved, node
from umbel.mods.choose import choice_made, choosing
from umbel.protocol.errors import ConfigError, ProtocolError

FALSE_ALARM = 1e-6
STACKED = {"w": np.array([[0, 0], [5, 6], [4, -4]], np.float32), "b": np.array([1, 2, 3], np.float16)}


def distance(arrays: ArrayRecord, context: Context) -> float:
    """The loss of a client whose optimum is near the second hypothesis."""
    return float(np.square(arrays["w"].numpy() - [5, 5]).sum())


class Seen:
    """A train function that remembers what it saw, and in which choice."""

    def __init__(self) -> None:
        self.contents: list[RecordDict] = []
        self.choices: list[float | None] = []

    def __call__(self, msg: Message, context: Context) -> Message:
        self.contents.append(msg.content)
        self.choices.append(choice_made())
        return moved(1.0)(msg, context)

    @property
    def biases(self) -> list[int]:
        return [int(content.array_records["arrays"]["b"].numpy()) for content in self.contents]


def test_a_function_sees_the_one_model_that_fits_as_an_ordinary_message() -> None:
    seen, sent = Seen(), RecordDict({**asks(STACKED, k=3), "more": MetricRecord({"x": 1})})
    reply = answer(node([umbel.ChooseHypothesis(distance)], seen), sent)
    [content] = seen.contents
    assert {name: array.numpy().tolist() for name, array in content["arrays"].items()} == {"w": [5, 6], "b": 2}
    assert content["arrays"]["b"].numpy().dtype == np.float16
    assert dict(content["config"]) == {"server-round": 1, "lr": 0.1}
    assert dict(content["more"]) == {"x": 1}
    assert seen.choices == [math.inf], "an open one"
    assert choice_made() is None, "the choice is over"
    assert reply.content.array_records["arrays"]["w"].numpy().tolist() == [6, 7]
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 61}, "the reply is the app's own"


@pytest.mark.parametrize("kind", ["train", "train.again", "evaluate"])
def test_a_single_hypothesis_is_unstacked_as_well(kind: str) -> None:
    seen = Seen()
    one = {name: value[:1] for name, value in STACKED.items()}
    answer(node([umbel.ChooseHypothesis(distance, epsilon=1.0)], seen), asks(one, k=1), kind)
    assert seen.contents[0]["arrays"]["w"].numpy().tolist() == [0, 0]
    assert seen.choices == [0.0], "there was nothing to choose"


def test_neither_mod_nor_app_changes_the_message_that_other_nodes_get() -> None:
    def vandal(msg: Message, context: Context) -> Message:
        reply = moved(0.0)(msg, context)
        msg.content["arrays"]["w"] = arrays({"w": np.zeros(9)})["w"]
        msg.content["config"]["lr"] = 7.0
        del msg.content["arrays"]
        msg.metadata.group_id = SECRET
        msg.metadata.message_type = "train.diagnosis"
        return reply

    def rough(arrays: ArrayRecord, context: Context) -> float:
        loss = distance(arrays, context)
        arrays.clear()
        return loss

    msg = message(asks(STACKED, k=3))
    before = wire(msg)
    reply = umbel.ChooseHypothesis(rough)(msg, context(), vandal)
    assert wire(msg) == before
    assert reply.content.array_records["arrays"]["w"].numpy().tolist() == [5, 6]


def chosen(mod: umbel.ChooseHypothesis, times: int, stacked: dict[str, Any] = STACKED) -> Counter[int]:
    """Return how often each hypothesis was seen, by its bias, where nothing of the loss leaves."""
    seen = Seen()
    grid, content = node([mod], seen), asks(stacked, k=len(stacked["b"]))
    for _ in range(times):
        assert SECRET.encode() not in wire(answer(grid, content))
    return Counter(seen.biases)


def test_a_randomised_choice_is_randomised_response() -> None:
    """P(best) = e^eps / (e^eps + 2), and each other 1 / (e^eps + 2): chi-squared. False alarm 1e-6."""
    counts, best = chosen(umbel.ChooseHypothesis(distance, epsilon=1.0), 1500), math.e / (math.e + 2)
    shares = np.array([(1 - best) / 2, best, (1 - best) / 2])
    assert stats.chisquare([counts[bias] for bias in (1, 2, 3)], shares * 1500).pvalue > FALSE_ALARM
    wrong = np.array([1 / 3, 1 / 3, 1 / 3])
    assert stats.chisquare([counts[bias] for bias in (1, 2, 3)], wrong * 1500).pvalue < FALSE_ALARM


def test_every_loss_is_computed_whatever_was_drawn() -> None:
    """Otherwise the time would tell that a client was assigned its model."""
    computed = []

    def counted(arrays: ArrayRecord, context: Context) -> float:
        computed.append(arrays)
        return distance(arrays, context)

    chosen(umbel.ChooseHypothesis(counted, epsilon=0.01), 10)
    assert len(computed) == 10 * 3


UNUSABLE: dict[str, Callable[[ArrayRecord, Context], Any]] = {
    "an exception": fails(ValueError(SECRET)),
    "the end of the process": fails(SystemExit(SECRET)),
    "NaN": lambda arrays, context: math.nan,
    "infinity": lambda arrays, context: math.inf,
    "minus infinity": lambda arrays, context: -math.inf,
    "text": lambda arrays, context: SECRET,
    "nothing": lambda arrays, context: None,
    "an array": lambda arrays, context: np.zeros(3),
}


@pytest.mark.parametrize("loss", UNUSABLE)
def test_a_loss_that_fails_counts_as_infinite_and_where_no_model_fits_one_is_drawn(loss: str) -> None:
    """Uniformly: that one of three is missing in sixty draws has a chance below 1e-10."""

    def partly(arrays: ArrayRecord, context: Context) -> Any:
        return UNUSABLE[loss](arrays, context) if arrays["b"].numpy() != 3 else 1e300

    assert chosen(umbel.ChooseHypothesis(partly), 5) == {3: 5}
    counts = chosen(umbel.ChooseHypothesis(UNUSABLE[loss]), 60)
    assert set(counts) == {1, 2, 3}
    assert counts.total() == 60


def test_who_stops_a_node_stops_it_and_where_training_fails_the_choice_is_over() -> None:
    with pytest.raises(KeyboardInterrupt):
        answer(node([umbel.ChooseHypothesis(fails(KeyboardInterrupt()))]), asks(STACKED, k=3))
    with pytest.raises(ValueError, match=r"^$"):
        umbel.ChooseHypothesis(distance)(message(asks(STACKED, k=3)), context(), fails(ValueError()))
    assert choice_made() is None


@pytest.mark.parametrize("epsilon", [-1.0, 31.0, math.nan, math.inf, True, "1", None])
def test_an_epsilon_that_cannot_be(epsilon: Any) -> None:
    with raises(ConfigError, "config.choice-epsilon", repr(epsilon)):
        umbel.ChooseHypothesis(distance, epsilon=epsilon)


WRONG: dict[str, RecordDict] = {
    "no number": asks(STACKED, k="3"),
    "a truth value": asks(STACKED, k=True),
    "none": asks(STACKED, k=0),
    "fewer": asks(STACKED, k=2),
    "more": asks(STACKED, k=4),
    "one array of another length": asks(STACKED | {"b": np.zeros(2, np.float32)}, k=3),
    "an array without axes": asks(STACKED | {"b": np.zeros((), np.float32)}, k=3),
    "no arrays": asks({}, k=3),
    "no record of arrays": RecordDict({"config": ConfigRecord({"k": 3})}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_message_that_is_no_stack_is_refused(wrong: str) -> None:
    seen = Seen()
    reply = answer(node([umbel.ChooseHypothesis(distance)], seen), WRONG[wrong])
    assert reply.has_error()
    assert "protocol.hypotheses" in reply.error.reason
    with raises(ProtocolError, "protocol.hypotheses"):
        umbel.ChooseHypothesis(distance)(message(WRONG[wrong]), context(), seen)
    assert not seen.contents


# --- what an app cannot do, and what the choice is worth inside of other Mods


def test_a_choice_in_a_choice_costs_both_and_in_an_open_one_is_open() -> None:
    with choosing(3, 1.0):
        with choosing(2, 0.5):
            assert choice_made() == 1.5
        with choosing(2, 0.0):
            assert choice_made() == math.inf
    assert choice_made() is None


def test_in_another_thread_a_choice_counts_as_open() -> None:
    """A Mod between the two may go on there, where the choice is not known."""
    found: list[float | None] = []
    with choosing(3, 1.0):
        thread = threading.Thread(target=lambda: found.append(choice_made()))
        thread.start()
        thread.join()
    assert found == [math.inf]


def test_records_may_have_other_names() -> None:
    """As where a strategy has another arrayrecord_key and configrecord_key."""
    inner: list[Message] = []

    def keep(msg: Message, context: Context) -> Message:
        inner.append(msg)
        return Message(RecordDict(), reply_to=msg)

    content = RecordDict({"model": arrays(STACKED), "cfg": ConfigRecord({"k": 3})})
    umbel.ChooseHypothesis(distance)(message(content), context(), keep)
    assert inner[0].content.array_records["model"]["w"].numpy().tolist() == [5, 6]
    assert dict(inner[0].content.config_records["cfg"]) == {}
