"""A malicious server, and an app's function that goes wrong, at the gate of an ordinary Flower app.

In each case nothing unsanitised leaves, the ledger is right, and the node goes on serving.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.helpers.examples import examples
from tests.helpers.flower_apps import (
    SECRET,
    Node,
    Train,
    answered,
    arrays,
    asks,
    fails,
    left,
    replies,
    returns,
    tampers,
    useless,
)
from tests.helpers.hostile import NO_MODEL, UNREADABLE
from tests.helpers.messages import refused, wire
from umbel.mods.gate import Gate
from umbel.privacy.site.journal import Journal

START = {"w": np.array([1.0, 2.0], np.float32), "b": np.zeros((), np.float32)}
FAR = 1e6
"""What a client's own update is: far more than the radius, so that it would be seen."""


def honest(msg: Message) -> Message:
    return answered(msg, lambda value: value + np.float32(FAR), train_loss=0.7, **{"num-examples": 61})


GATE = Gate(4.0, 1.0, frozen="b")


@pytest.fixture
def site(tmp_path: Path) -> Node:
    return Node(GATE, honest, tmp_path)


def hidden(reply: Message) -> bool:
    """Whether what left lies within the noise of a radius around the start, where the update lies far outside."""
    return float(np.abs(left(reply)["w"] - START["w"]).max()) < FAR / 1e3


def goes_on(node: Node) -> bool:
    return hidden(node.send(asks(START)))


# --- messages


def with_array(value: Any, name: str = "w") -> RecordDict:
    content = asks(START)
    content["arrays"][name] = value if isinstance(value, Array) else Array(np.asarray(value))
    return content


CANNOT_BE: dict[str, Callable[[], RecordDict]] = {
    "nothing": RecordDict,
    "no arrays": lambda: RecordDict({"config": ConfigRecord({"server-round": 1})}),
    "an empty record of arrays": lambda: RecordDict({"arrays": ArrayRecord()}),
    "two records of arrays": lambda: RecordDict({**asks(START), "more": arrays(START)}),
    "only what is frozen": lambda: asks({"b": START["b"]}),
    "another model without what is frozen": lambda: asks({"w": START["w"]}),
    "arrays without numbers": lambda: asks({"w": np.zeros((0, 2), np.float32), "b": START["b"]}),
    "a NumPyClient's parameters": lambda: RecordDict({"fitins.parameters": arrays(START)}),
} | {name: lambda array=array: with_array(array) for name, array in (UNREADABLE | NO_MODEL).items()}  # type: ignore[misc]


@pytest.mark.parametrize("message", CANNOT_BE)
def test_a_message_that_cannot_be_is_refused_before_anybody_pays(message: str, site: Node) -> None:
    reply = site.send(CANNOT_BE[message]())
    assert refused(reply)
    assert (site.asked, site.paid) == (0, 0)
    assert goes_on(site)


def test_a_query_is_refused_for_what_it_is_whatever_it_carries(site: Node) -> None:
    for content in (RecordDict(), asks(START)):
        assert site.send(content, "query").error.reason == "refused [refused.message-type]"
    assert (site.asked, site.paid) == (0, 0)


def test_a_train_function_by_another_name_is_behind_the_gate_as_well(site: Node) -> None:
    assert hidden(site.send(asks(START), "train.steal"))
    assert site.paid == 1


ODD_STARTS = {
    "the largest numbers": np.full(2, np.finfo(np.float32).max),
    "1e38": np.array([1e38, -1e38], np.float32),
    "the smallest numbers": np.full(2, np.finfo(np.float32).smallest_subnormal),
    "the largest of 16 bits": np.full(2, -np.finfo(np.float16).max),
    "64 bits": np.array([1e38, 1e-300]),
    "the other order of bytes": np.array([1.0, 2.0], ">f4"),
}


@pytest.mark.parametrize("start", ODD_STARTS)
def test_from_whatever_start_noise_and_price_are_those_of_the_gate(start: str, site: Node) -> None:
    """Around numbers of 1e38 a radius of 1 would not be seen at all: 32 bits leave the noise more room there.

    Noise above the largest numbers is cut off, so both stay as they are in a quarter of the releases. That all eight
    are alike has a chance of 2e-5.
    """
    value = ODD_STARTS[start]
    node, seen = site, set()
    for _ in range(8):
        reply = left(node.send(with_array(value)))["w"]
        assert reply.dtype == value.dtype
        assert np.isfinite(reply).all()
        seen.add(reply.tobytes())
    # 16 bits are coarser than this noise near their largest number: they tell less, not more.
    assert len(seen) > 1 or value.dtype == np.float16, "there is noise"
    [(release, times)] = node.account.items()
    assert (release.n, release.noise_multiplier, times) == (2, 4.0, 8)


def test_a_config_that_asks_for_more_gets_no_more(site: Node) -> None:
    content = asks(START)
    wishes = {"noise-multiplier": 1e-9, "radius": 1e9, "budget": 1e9, "seed": 3, "frozen": "*", "partition-id": 7}
    content["config"].update(wishes)
    content["training"] = ConfigRecord({"noise_multiplier": 0.0, "disclose_choice": True})
    content["metrics"] = MetricRecord({"num-examples": 3})
    assert hidden(site.send(content))
    assert [release.noise_multiplier for release in site.account] == [4.0]


def test_a_round_that_cannot_be_is_on_record_as_the_first(site: Node) -> None:
    for round in (0, -1, 2**62, True, "one", 2.5, [1, 2]):
        assert hidden(site.send(asks(START, round)))
    assert site.paid == 7
    assert {row["round"] for row in Journal(site.path).rows()} == {1}


# --- an app's function that goes wrong


W = START["w"] + np.float32(FAR)
BREAKS = useless(START, FAR) | {"returns whole numbers": returns(START, FAR, w=np.array([17, 18]))}
HARMLESS: dict[str, Train] = {
    "is honest": honest,
    "returns NaN": returns(START, FAR, w=START["w"] * np.float32(np.nan)),
    "returns infinity": returns(START, FAR, w=START["w"] * np.float32(np.inf)),
    "returns 64 bits that 32 cannot hold": returns(START, FAR, w=np.array([1e300, 0])),
    "tells more": replies(
        arrays=arrays({"w": W, "b": W}),
        metrics=MetricRecord({SECRET: [17.0] * 17, "num-examples": 17}),
        more=MetricRecord({"loss": 17.0}),
        config=ConfigRecord({"rows": SECRET}),
    ),
    "leaves out what is frozen": returns(START, FAR, b=None),
    "changes what came": tampers,
}
EVERYTHING = BREAKS | HARMLESS


@pytest.mark.parametrize("fault", EVERYTHING)
def test_whatever_goes_wrong_at_a_site_its_reply_is_as_any_other(
    fault: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, node_log: io.StringIO
) -> None:
    """Whether it does may depend on the data: a reply that stayed away, or were longer, would tell."""
    node = Node(GATE, EVERYTHING[fault], tmp_path)
    reply = node.send(asks(START))
    assert hidden(reply)
    assert left(reply)["b"] == START["b"]
    assert SECRET.encode() not in wire(reply)
    assert node.paid == 1
    assert (fault in BREAKS) == ("answers as if it had no update" in node_log.getvalue())
    other = Node(GATE, honest, tmp_path_factory.mktemp("other")).send(asks(START))
    assert [type(record) for record in reply.content.values()] == [type(record) for record in other.content.values()]
    assert len(wire(reply)) == len(wire(other))


class Panic(BaseException):
    """What a library's code in Rust raises: no `Exception`."""


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("error", [Panic, asyncio.CancelledError, GeneratorExit])
def test_what_is_no_exception_to_python_is_a_fault_all_the_same(
    kind: str, error: type[BaseException], tmp_path: Path
) -> None:
    """Otherwise the process would end, and the server learn from its silence that these data make it panic."""
    node = Node(Gate(4.0, 1.0, frozen="b", reports=["loss"]), fails(error(SECRET)), tmp_path, reports="noise=2.0")
    assert not refused(node.send(asks(START), kind))
    assert node.paid == 1


@pytest.mark.parametrize("fault", BREAKS)
def test_in_a_simulation_a_fault_is_seen_by_its_author_and_nobody_else(fault: str, node_log: io.StringIO) -> None:
    """Nobody's data are there, and a function that never works would otherwise train noise in silence."""
    reply = Node(GATE, BREAKS[fault]).send(asks(START))
    assert refused(reply)
    assert "umbel refused to answer (train)" in node_log.getvalue()
    if fault == "raises":
        assert f"ValueError: {SECRET}" in node_log.getvalue(), "with all of its trace"


@pytest.mark.parametrize("fault", HARMLESS)
def test_in_a_simulation_what_is_no_fault_of_the_apps_is_released(fault: str) -> None:
    assert hidden(Node(GATE, HARMLESS[fault]).send(asks(START)))


def test_a_function_that_takes_too_long_is_answered_for(tmp_path: Path, node_log: io.StringIO) -> None:
    def hangs(msg: Message) -> Message:
        while True:
            pass

    node = Node(GATE, hangs, tmp_path, max_seconds=0.05)
    assert hidden(node.send(asks(START)))
    assert "max-seconds sets it" in node_log.getvalue()


SCORES_BREAK: dict[str, Train] = {
    "raises": fails(ValueError(SECRET)),
    "returns no metrics": replies(),
    "names another metric": replies(metrics=MetricRecord({"loss": 17.0})),
    "returns a list": replies(metrics=MetricRecord({"eval_loss": [0.5] * 17})),
    "returns NaN": replies(metrics=MetricRecord({"eval_loss": float("nan")})),
    "returns infinity": replies(metrics=MetricRecord({"eval_loss": float("inf")})),
}


@pytest.mark.parametrize("fault", SCORES_BREAK)
def test_a_report_with_noise_is_as_any_other_whatever_goes_wrong(fault: str, tmp_path: Path) -> None:
    gate = Gate(4.0, 1.0, reports=["eval_loss"])
    node = Node(gate, honest, tmp_path, SCORES_BREAK[fault], reports="noise=2.0")
    reply = node.send(asks(START), "evaluate")
    assert set(reply.content["metrics"]) == {"eval_loss", "num-examples"}
    assert np.isfinite(reply.content["metrics"]["eval_loss"])
    assert SECRET.encode() not in wire(reply)
    assert node.paid == 1


@pytest.mark.parametrize("fault", ["raises", "returns no metrics", "names another metric", "returns a list"])
def test_a_validation_site_says_refused_and_no_more(fault: str, tmp_path: Path) -> None:
    gate = Gate(4.0, 1.0, reports=["eval_loss"])
    assert refused(Node(gate, honest, tmp_path, SCORES_BREAK[fault], role="validation").send(asks(START), "evaluate"))


TYPES = st.sampled_from([np.float16, np.float32, np.float64, np.int64, np.bool_, np.complex64, ">f4", "U2"])
ANY_ARRAYS = st.dictionaries(
    st.text(max_size=5),
    TYPES.flatmap(lambda kind: hnp.arrays(kind, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))),
    max_size=4,
)
ANY_RECORD = st.one_of(
    ANY_ARRAYS.map(arrays),
    st.dictionaries(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1) | st.floats()).map(MetricRecord),
    st.dictionaries(st.text(max_size=14), st.integers(-5, 5) | st.text() | st.booleans() | st.binary()).map(
        ConfigRecord
    ),
)


@settings(derandomize=True, max_examples=examples(40))
@given(
    st.fixed_dictionaries({"arrays": ANY_ARRAYS.map(arrays)}, optional={"config": ANY_RECORD, "more": ANY_RECORD}),
    st.sampled_from(["train", "train", "evaluate", "query", "train.steal"]),
)
def test_whatever_comes_is_refused_for_nothing_or_answered_and_paid_for(records: dict[str, Any], kind: str) -> None:
    node = Node(Gate(4.0, 1.0), honest)
    with np.errstate(all="ignore"):
        reply = node.send(RecordDict(records), kind)
    if reply.has_error():
        assert refused(reply)
        assert node.paid == 0
        return
    assert node.paid == 1
    assert set(reply.content) == {"arrays", "metrics"}
    leaves = left(reply)
    sent = {name: array.numpy() for name, array in records["arrays"].items()}
    assert [(name, value.dtype, value.shape) for name, value in leaves.items()] == [
        (name, value.dtype, value.shape) for name, value in sent.items()
    ]
    assert all(np.isfinite(value).all() for value in leaves.values())
