"""Arrays arrive as they were sent, in Flower's own format, and bytes that are no array are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.errors import raises
from tests.helpers.hostile import UNREADABLE, matrix
from tests.helpers.records import assert_same_arrays, over_the_wire, stacked
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ProtocolError
from umbel.protocol.records import from_array_record, in_steps, pack, record_in, times_step, to_array_record, unpack


@given(stacked(smallest=0))
def test_arrays_arrive_as_they_were_sent(arrays: Arrays) -> None:
    arrived = over_the_wire(RecordDict({"arrays": to_array_record(arrays)}))
    assert_same_arrays(from_array_record(record_in(arrived, "arrays", ArrayRecord)), arrays)


@pytest.mark.parametrize(
    "value", [np.float32(3), np.zeros((0, 3), np.float32), np.arange(6, dtype=np.int64).reshape(2, 3)]
)
def test_arrays_are_encoded_as_flower_does(value: Any) -> None:
    record = to_array_record({"w": np.asarray(value)})
    assert record["w"] == Array(np.asarray(value))
    np.testing.assert_array_equal(from_array_record(record)["w"], record["w"].numpy())


def test_in_another_order_of_memory_the_numbers_are_the_same_and_cannot_be_changed() -> None:
    assert to_array_record({}) == ArrayRecord()
    value = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    for record in (ArrayRecord({"w": Array(value)}), to_array_record({"w": value})):
        read = from_array_record(record)["w"]
        np.testing.assert_array_equal(read, value, strict=True)
        with pytest.raises(ValueError, match="read-only"):
            read[0] = 1


@pytest.mark.parametrize("array", UNREADABLE.values(), ids=UNREADABLE)
def test_bytes_that_are_no_array_are_a_protocol_error(array: Array) -> None:
    with raises(ProtocolError, "protocol.arrays", "w"):
        from_array_record(ArrayRecord({"w": array}))
    with raises(ProtocolError, "protocol.arrays"):
        unpack(matrix(array))


def test_a_record_is_found_by_name_and_kind() -> None:
    content = RecordDict({"a": ConfigRecord({"x": 1}), "b": MetricRecord({"y": 2})})
    assert record_in(content, "a", ConfigRecord)["x"] == 1
    for name, kind in (("a", MetricRecord), ("b", ConfigRecord), ("c", ArrayRecord)):
        with raises(ProtocolError, "protocol.records", kind.__name__, name):
            record_in(content, name, kind)


# --- packed


NAMES = ("z", "a:b", "a b", "ü", "β", "日本", "(", "'\"", "\\", "f0", "a" * 10_000)
PACKED: dict[str, dict[str, Any]] = {
    "two layers": {"0.weight": np.arange(12, dtype=np.float32).reshape(2, 3, 2), "0.bias": np.ones((2, 3), np.float32)},
    "no rows": {"weight": np.zeros((0, 3), np.float32)},
    "a number a row": {"scale": np.array([1.5, -2.0], np.float32), "empty": np.zeros((2, 0), np.float32)},
    "names of all kinds": {name: np.full((1, 2), i, np.float32) for i, name in enumerate(NAMES)},
    "not in order of memory": {"w": np.arange(6, dtype=np.float32).reshape(3, 2).T},
    "thousands of layers": {f"layers.{i}.attention.weight": np.full((2, 1), i, np.float32) for i in range(3000)},
} | {kind: {"w": np.ones((2, 1), kind), "v": np.zeros((2, 3), kind)} for kind in ("f2", "f8", "i8", "?", "c8")}


@pytest.mark.parametrize("arrays", PACKED.values(), ids=PACKED)
def test_packed_arrays_travel_as_one_and_arrive_as_they_are(arrays: dict[str, Any]) -> None:
    arrived = record_in(over_the_wire(RecordDict({"arrays": pack(arrays)})), "arrays", ArrayRecord)
    assert len(arrived) == 1
    found = unpack(arrived)
    assert list(found) == list(arrays), "in the same order"
    assert_same_arrays(found, arrays)
    assert not any(value.flags.writeable for value in found.values())


@pytest.mark.parametrize("arrays", [(), ("1f", "2f"), ("2f", "1f"), ("0f", "1f"), ("2f", "2d")])
def test_only_arrays_of_one_length_and_type_can_be_packed(arrays: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="arrays of one length and type can be packed"):
        pack({one: np.zeros((int(one[0]), 1), one[1]) for one in arrays})


def test_names_that_nobody_would_read_are_not_sent() -> None:
    with pytest.raises(ValueError, match="more than 262144"):
        pack({"w" * 300_000: np.zeros((1, 1))})


def test_the_columns_of_the_matrix_are_the_arrays_one_after_the_other() -> None:
    arrays = {"w": np.array([[[1, 2]], [[4, 5]]], np.float32), "b": np.array([[3], [6]], np.float32)}
    ((name, matrix),) = pack(arrays).items()
    assert name == '{"w":[1,2],"b":[1]}'
    assert matrix.numpy().tolist() == [[1, 2, 3], [4, 5, 6]]


NO_NAMES = (
    "", "{}", "2", '{"w":2}', '{"w":[1.0,2]}', '{"w":[true,2]}', '{"w":[-1,-2]}', '{"w":[1099511627776,0],"v":[2]}',
    '{"w":%s}' % ([1] * 33 + [2]), '{"w":[1],"w":[1]}', "[[1,[2]]]", '{"w":[3]}', "[" * 100_000,
    '{"w":[%s]}' % ("9" * 5000), "w" * (2**18 + 1),
)  # fmt: skip


@pytest.mark.parametrize("name", NO_NAMES, ids=lambda name: name[:40])
def test_a_name_that_does_not_fit_the_matrix_is_refused(name: str) -> None:
    with raises(ProtocolError, "protocol.arrays"):
        unpack(ArrayRecord({name: Array(np.zeros((2, 2), np.float32))}))


def test_one_matrix_is_read_and_no_more() -> None:
    for record in (ArrayRecord(), to_array_record({'{"w":[1]}': np.zeros((2, 1)), '{"v":[1]}': np.zeros((2, 1))})):
        with raises(ProtocolError, "protocol.arrays"):
            unpack(record)
    for value in (np.zeros(2), np.zeros((2, 1, 1)), np.float64(1)):
        with raises(ProtocolError, "protocol.arrays"):
            unpack(ArrayRecord({'{"w":[1]}': Array(np.asarray(value))}))


@given(
    st.lists(st.lists(st.integers(-(2**15 - 1), 2**15 - 1), min_size=3, max_size=3), max_size=4), st.integers(-140, 100)
)
def test_multiples_of_a_step_arrive_to_the_bit_in_half_the_bytes(times: list[list[int]], exponent: int) -> None:
    step = 2.0**exponent
    values = (np.array(times, np.float64).reshape(-1, 3) * step).astype(np.float32)
    arrays = {"w": values[:, :2], "b": values[:, 2]}
    short = pack(in_steps(arrays, step))
    (whole,), (half,) = pack(arrays).values(), short.values()
    assert len(whole.data) - len(half.data) == values.nbytes / 2
    assert_same_arrays(times_step(unpack(short), step), arrays)


def test_what_16_bits_cannot_count_is_as_far_as_they_can() -> None:
    far = {"w": np.array([[1.0, -1e9, 3e38]], np.float32)}
    np.testing.assert_array_equal(times_step(in_steps(far, 0.5), 0.5)["w"], [[1.0, -16383.5, 16383.5]])


@pytest.mark.parametrize("step", [0.0, -0.5, 0.3, float("nan"), float("inf"), 1, True, "1", None, [0.5]])
def test_a_step_that_is_no_power_of_two_is_refused_and_any_of_numbers_that_travel_as_they_are(step: Any) -> None:
    for kind, asked in ((np.int16, step), (np.float32, 0.5)):
        with raises(ProtocolError, "protocol.arrays"):
            times_step({"w": np.ones((1, 2), kind)}, asked)
