"""What travels is checked on arrival, survives Flower's own serialisation, and depends on nothing else in the app."""

from __future__ import annotations

import ast
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.arrays import Arrays, flatten, unflatten
from protocol.errors import ProtocolError
from protocol.messages import (
    ARRAYS,
    CONFIG,
    COUNTS,
    HYPOTHESES,
    LOCAL,
    SCORES,
    VERSION,
    Demand,
    Hosting,
    asked_clients,
    evaluate_reply,
    evaluate_request,
    local_reply,
    local_request,
    price,
    query,
    train_reply,
    train_request,
)
from protocol.plugins import import_by_name
from protocol.records import from_array_record, to_array_record

ROOT = Path(__file__).parents[1]
PACKAGES = ("client", "models", "privacy", "server", "simulation", "strategies")

DEMAND = Demand(
    round=3, clients=(0, 2, 5), local_epochs=1, step_size=0.1, batch_size=10, noise_multiplier=5.0, radius=0.5
)
# Two models of 2 x 2 + 1 parameters, as they are stacked in a message.
STACKED: Arrays = {
    "weight": np.array([[[1, 2], [3, 4]], [[6, 7], [8, 9]]], np.float32),
    "bias": np.array([[5], [10]], np.float32),
}


def over_the_wire(content: RecordDict) -> RecordDict:
    """Return what arrives of a message's content after Flower has turned it into bytes and back."""
    sent = recorddict_to_proto(content).SerializeToString()
    return recorddict_from_proto(ProtoRecordDict.FromString(sent))


def changed(**entries: Any) -> ConfigRecord:
    """Return the record of `DEMAND` with some entries changed; an entry of None is taken out."""
    values: dict[str, Any] = {**DEMAND.to_record(), **entries}
    return ConfigRecord({name: value for name, value in values.items() if value is not None})


def assert_same_arrays(ours: Arrays, theirs: Arrays) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, strict=True)


# --- a demand

whole = st.integers(0, 2**63 - 1)
positive = st.floats(0, exclude_min=True, allow_infinity=False)
# Noise on layers or rows by themselves goes with radius update alone.
modes = st.sampled_from([("update", "vector"), ("update", "layer"), ("update", "row"), ("public", "vector")])
demands = st.builds(
    lambda mode, **fields: Demand(radius_mode=mode[0], noise_per=mode[1], **fields),
    mode=modes,
    round=st.integers(1, 2**63 - 1),
    clients=st.lists(whole, min_size=1, max_size=20, unique=True).map(tuple),
    local_epochs=whole,
    local_steps=whole,
    message_noise=st.floats(0, allow_infinity=False),
    step_size=positive,
    batch_size=whole,
    noise_multiplier=st.floats(0, allow_infinity=False),
    radius=positive,
    disclose_choice=st.booleans(),
)


@given(demands)
def test_a_demand_comes_back_from_its_record(demand: Demand) -> None:
    assert Demand.from_record(demand.to_record()) == demand


@given(demands)
def test_a_demand_arrives_as_it_was_sent(demand: Demand) -> None:
    arrived = over_the_wire(train_request(to_array_record(STACKED), demand))
    assert Demand.from_record(arrived.config_records[CONFIG]) == demand
    assert_same_arrays(from_array_record(arrived.array_records[HYPOTHESES]), STACKED)


def test_a_whole_number_will_do_for_a_real_one() -> None:
    assert Demand.from_record(changed(step_size=1, noise_multiplier=0, radius=2)).noise_multiplier == 0


def test_entries_the_demand_does_not_know_are_not_read() -> None:
    assert Demand.from_record(changed(data_path="/etc/passwd")) == DEMAND


@pytest.mark.parametrize("name", list(DEMAND.to_record()))
def test_a_missing_entry_is_named(name: str) -> None:
    with pytest.raises(ProtocolError, match=f"the demand lacks {name}$"):
        Demand.from_record(changed(**{name: None}))


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("round", 3.0, "float"),
        ("round", True, "bool"),
        ("clients", 3, "int"),
        ("clients", b"\x00\x02", "bytes"),
        ("local_epochs", "1", "str"),
        ("local_epochs", True, "bool"),
        ("step_size", "0.1", "str"),
        ("step_size", True, "bool"),
        ("batch_size", 10.0, "float"),
        ("batch_size", False, "bool"),
        ("noise_multiplier", [5.0], "list"),
        ("noise_multiplier", True, "bool"),
        ("radius_mode", 1, "int"),
        ("radius", True, "bool"),
        ("noise_per", 1, "int"),
        ("local_steps", 1.0, "float"),
        ("local_steps", True, "bool"),
        ("message_noise", "0.1", "str"),
        ("message_noise", False, "bool"),
        ("disclose_choice", "no", "str"),
    ],
)
def test_an_entry_of_the_wrong_type_is_named(name: str, value: Any, kind: str) -> None:
    with pytest.raises(ProtocolError, match=f"{name} of the demand is a {kind}$"):
        Demand.from_record(changed(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("round", 0, "round must be a whole number of at least 1, got 0"),
        ("local_epochs", -1, "local-epochs must be a whole number of at least 0, got -1"),
        ("local_steps", -1, "local-steps must be a whole number of at least 0, got -1"),
        ("message_noise", -1.0, "message-noise must be a finite number of at least 0, got -1.0"),
        ("noise_per", "parameter", "noise-per must be one of vector, layer, row, got 'parameter'"),
        ("batch_size", -1, "batch-size must be a whole number of at least 0, got -1"),
        ("step_size", 0.0, "step-size must be a finite number above 0, got 0.0"),
        ("step_size", -0.1, "step-size must be a finite number above 0, got -0.1"),
        ("step_size", float("nan"), "step-size must be a finite number above 0, got nan"),
        ("step_size", float("inf"), "step-size must be a finite number above 0, got inf"),
        ("noise_multiplier", -5.0, "noise-multiplier must be a finite number of at least 0, got -5.0"),
        ("noise_multiplier", float("nan"), "noise-multiplier must be a finite number of at least 0, got nan"),
        ("noise_multiplier", float("inf"), "noise-multiplier must be a finite number of at least 0, got inf"),
        ("radius_mode", "secret", "radius must be one of update, public, got 'secret'"),
        ("radius", 0.0, "the radius must be a finite number above 0, got 0.0"),
        ("radius", float("nan"), "the radius must be a finite number above 0, got nan"),
        ("clients", [], "clients must be a list of whole numbers with at least one entry"),
        ("clients", [0.0, 1.0], "clients must be a list of whole numbers with at least one entry"),
        ("clients", ["0"], "clients must be a list of whole numbers with at least one entry"),
        ("clients", [True], "clients must be a list of whole numbers with at least one entry"),
        ("clients", [1, 1], "each client may be asked once, counted from 0"),
        ("clients", [0, -1], "each client may be asked once, counted from 0"),
    ],
)
def test_an_impossible_value_is_named(name: str, value: Any, reason: str) -> None:
    arrived = over_the_wire(RecordDict({CONFIG: changed(**{name: value})}))
    with pytest.raises(ProtocolError, match=f"^{reason}$"):
        Demand.from_record(arrived.config_records[CONFIG])


@pytest.mark.parametrize("unit", ["layer", "row"])
def test_a_public_radius_is_of_the_whole_vector(unit: str) -> None:
    Demand(1, (0,), 1, 0.1, 10, 5.0, noise_per=unit)
    Demand(1, (0,), 1, 0.1, 10, 5.0, radius_mode="public", noise_per="vector")
    with pytest.raises(ProtocolError, match=f"noise-per {unit} goes with radius update alone"):
        Demand(1, (0,), 1, 0.1, 10, 5.0, radius_mode="public", noise_per=unit)


def test_a_demand_without_steps_and_epochs_hands_over_the_hypotheses_alone() -> None:
    """R = 0 of the PAC paper."""
    demand = Demand(1, (0,), 0, 0.1, 10, 5.0)
    assert (demand.local_epochs, demand.local_steps) == (0, 0)


def test_a_server_cannot_make_an_impossible_demand() -> None:
    with pytest.raises(ProtocolError, match="noise-multiplier"):
        Demand(1, (0,), 1, 0.1, 10, float("nan"))


# --- local models


def test_who_is_asked_for_a_local_model_arrives_as_sent() -> None:
    arrived = over_the_wire(local_request([3, 0, 17]))
    assert set(arrived) == {CONFIG}
    assert asked_clients(arrived.config_records[CONFIG]) == (3, 0, 17)


def test_local_models_arrive_as_they_were_told() -> None:
    told = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrived = over_the_wire(local_reply(told))
    assert set(arrived) == {ARRAYS}
    assert_same_arrays(from_array_record(arrived.array_records[ARRAYS]), {LOCAL: told})


# --- what a node says of itself


@given(st.builds(Hosting, train=whole, validation=whole, first=st.integers(-1, 9), step=st.integers(-1, 9)))
def test_hosting_arrives_as_it_was_sent(hosting: Hosting) -> None:
    arrived = over_the_wire(RecordDict({COUNTS: hosting.to_record()}))
    assert Hosting.from_record(arrived.metric_records[COUNTS]) == hosting


def test_a_query_asks_for_the_version_spoken_here() -> None:
    assert dict(over_the_wire(query()).config_records[CONFIG]) == {"version": VERSION}


def test_only_a_node_that_names_its_share_is_simulated() -> None:
    assert Hosting(3, 1, first=0, step=2).simulated
    assert not Hosting(3, 1).simulated


@pytest.mark.parametrize("version", [VERSION + 1, None])
def test_a_node_of_another_version_is_refused(version: int | None) -> None:
    record = Hosting(3, 1).to_record()
    del record["version"]
    if version is not None:
        record["version"] = version
    with pytest.raises(ProtocolError, match=f"speaks protocol {version}, this server speaks {VERSION}"):
        Hosting.from_record(record)


@pytest.mark.parametrize(
    "counts",
    [
        {"train": -1},
        {"validation": -1},
        {"train": 3.0},
        {"train": [3]},
        {"train": None},
        {"step": None},
        {"first": 0.0},
    ],
)
def test_counts_that_cannot_be_are_refused(counts: dict[str, Any]) -> None:
    values = {name: value for name, value in {**Hosting(3, 1).to_record(), **counts}.items() if value is not None}
    with pytest.raises(ProtocolError, match=f"reports counts that cannot be: .*'{next(iter(counts))}'"):
        Hosting.from_record(MetricRecord(values))


# --- evaluation


def test_evaluation_asks_for_clients_and_hypotheses() -> None:
    arrived = over_the_wire(evaluate_request(to_array_record(STACKED), 4, [7, 3]))
    assert asked_clients(arrived.config_records[CONFIG]) == (7, 3)
    assert_same_arrays(from_array_record(arrived.array_records[HYPOTHESES]), STACKED)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "the message names no clients"),
        ({"clients": 3}, "the message names no clients"),
        ({"clients": b"\x03"}, "the message names no clients"),
        ({"clients": []}, "clients must be a list of whole numbers"),
        ({"clients": [True]}, "clients must be a list of whole numbers"),
        ({"clients": [3, 3]}, "each client may be asked once"),
        ({"clients": [-3]}, "each client may be asked once"),
    ],
)
def test_evaluation_of_no_clients_or_impossible_ones_is_refused(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        asked_clients(ConfigRecord(record))


def test_scores_arrive_in_order_even_if_they_are_no_numbers() -> None:
    arrived = over_the_wire(evaluate_reply(np.array([0.5, np.nan, np.inf]), np.array([1, 0, 0.25], np.float32)))
    scores = arrived.metric_records[SCORES]
    np.testing.assert_array_equal(scores["loss"], [0.5, np.nan, np.inf])
    np.testing.assert_array_equal(scores["metric"], [1, 0, 0.25])


# --- releases


@pytest.mark.parametrize(("choices", "names"), [(None, {"released"}), ([1, 0], {"released", "choices"})])
def test_a_train_reply_holds_releases_and_public_counts_alone(choices: list[int] | None, names: set[str]) -> None:
    arrived = over_the_wire(train_reply(STACKED, [1, 0, 1], choices))
    assert set(arrived) == {ARRAYS, COUNTS}
    assert set(arrived.metric_records[COUNTS]) == names
    assert arrived.metric_records[COUNTS]["released"] == [1, 0, 1]
    assert arrived.metric_records[COUNTS].get("choices") == choices
    assert_same_arrays(from_array_record(arrived.array_records[ARRAYS]), STACKED)


def test_a_node_may_answer_that_nobody_released() -> None:
    nothing = {name: value[:0] for name, value in STACKED.items()}
    arrived = over_the_wire(train_reply(nothing, [0, 0]))
    arrays = from_array_record(arrived.array_records[ARRAYS])
    assert {name: value.shape for name, value in arrays.items()} == {"weight": (0, 2, 2), "bias": (0, 1)}


# --- arrays


@st.composite
def stacked(draw: st.DrawFn, smallest: int = 1) -> Arrays:
    """Draw named float32 arrays with one common leading axis, some of them scalars behind it."""
    rows = draw(st.integers(smallest, 4))
    shapes = st.lists(st.integers(1, 3), max_size=3)
    number = st.floats(width=32, allow_nan=False)
    names = draw(st.lists(st.sampled_from(["fc.weight", "fc.bias", "scale", "embedding"]), min_size=1, unique=True))
    return {name: draw(hnp.arrays(np.float32, (rows, *draw(shapes)), elements=number)) for name in names}


def test_flat_rows_hold_the_arrays_one_after_the_other() -> None:
    flat = flatten(STACKED)
    assert flat.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert flat.dtype == np.float64


@given(stacked())
def test_unflatten_undoes_flatten(arrays: Arrays) -> None:
    assert_same_arrays(unflatten(flatten(arrays), arrays), arrays)


@given(stacked(), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_flatten_undoes_unflatten_whatever_the_number_of_rows(like: Arrays, more: int, seed: int) -> None:
    n = flatten(like).shape[1]
    matrix = np.random.default_rng(seed).standard_normal((1 + more, n)).astype(np.float32)
    np.testing.assert_array_equal(flatten(unflatten(matrix, like)), matrix)


def test_no_rows_are_flat_too() -> None:
    nothing = {name: value[:0] for name, value in STACKED.items()}
    assert flatten(nothing).shape == (0, 5)
    assert_same_arrays(unflatten(np.zeros((0, 5)), STACKED), nothing)


@given(stacked(smallest=0))
def test_arrays_arrive_as_they_were_sent(arrays: Arrays) -> None:
    arrived = over_the_wire(RecordDict({ARRAYS: to_array_record(arrays)}))
    assert_same_arrays(from_array_record(arrived.array_records[ARRAYS]), arrays)


def test_a_view_is_sent_as_the_numbers_it_shows() -> None:
    transposed = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert_same_arrays(from_array_record(to_array_record({"a": transposed})), {"a": transposed})


def test_no_arrays_are_an_empty_record() -> None:
    assert to_array_record({}) == ArrayRecord()


# --- price


def test_the_price_of_the_hospital_network_is_eleven_thirds() -> None:
    assert price(11, 3.0) == Fraction(11, 3)


def test_the_price_is_that_of_the_number_asked_for_and_not_of_its_decimals() -> None:
    # 0.1 as a float is a little more than a tenth, so two parameters cost a little less than 20.
    cost = price(2, 0.1)
    assert cost is not None
    assert cost * Fraction(0.1) == 2
    assert cost < 20


@given(st.integers(1, 10**7), positive)
def test_prices_add_up_without_rounding(n: int, noise_multiplier: float) -> None:
    cost = price(n, noise_multiplier)
    assert isinstance(cost, Fraction)
    assert cost * 1000 * Fraction(noise_multiplier) == 1000 * n


def test_a_release_without_noise_has_no_price() -> None:
    assert price(11, 0.0) is None


# --- import by name


def test_an_object_is_found_by_its_name() -> None:
    assert import_by_name("protocol:Demand") is Demand
    assert import_by_name("os.path:join").__name__ == "join"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("garden.roses:Factory", "cannot import 'garden.roses' of 'garden.roses:Factory': No module named 'garden'"),
        ("os.roses:Factory", "cannot import 'os.roses' of 'os.roses:Factory': No module named 'os.roses'"),
        ("protocol:Roses", r"'protocol' has no 'Roses' \(asked for 'protocol:Roses'\)"),
        ("protocol:", r"'protocol' has no '' \(asked for 'protocol:'\)"),
        ("protocol", r"'protocol' has no '' \(asked for 'protocol'\)"),
    ],
)
def test_the_missing_half_of_a_name_is_told(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        import_by_name(name)


@pytest.mark.parametrize("name", [":Factory", ".roses:Factory", ""])
def test_a_name_without_a_module_is_told(name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot import '.*' of '{name}'"):
        import_by_name(name)


# --- architecture


def imported(file: Path) -> set[str]:
    """Return the top-level names of all modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module if node.module and not node.level else ".")
    return {name.partition(".")[0] or "." for name in names}


def test_imports_are_seen_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("import os.path, a as b\nfrom c.d import e\ndef f():\n    import g\n    from . import h\n")
    assert imported(file) == {"os", "a", "c", "g", "."}


@pytest.mark.parametrize("name", ["protocol", "federation"])
def test_the_modules_that_all_share_import_nothing_else_of_the_app(name: str) -> None:
    outside = imported(ROOT / f"{name}.py") - sys.stdlib_module_names
    assert outside <= {"flwr", "numpy"}, "a module of the app, or a new dependency"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_app_imports_nothing_that_stays_out_of_the_bundle(package: str) -> None:
    # Audits drive the app from outside, and stay out as well.
    files = [file for file in sorted((ROOT / package).rglob("*.py")) if "attacks" not in file.parts]
    assert files
    for file in files:
        assert not imported(file) & {"datasets", "experiments", "benchmarks", "tests", "."}, file


# --- arrays, read without a copy


@pytest.mark.parametrize(
    "value", [np.float32(3), np.zeros((0, 3), np.float32), np.arange(6, dtype=np.int64).reshape(2, 3)]
)
def test_arrays_are_encoded_as_flower_does(value: Any) -> None:
    record = to_array_record({"w": np.asarray(value)})
    assert record["w"] == Array(np.asarray(value))
    np.testing.assert_array_equal(from_array_record(record)["w"], record["w"].numpy())


def test_an_array_in_fortran_order_is_read_as_it_was_written() -> None:
    value = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(from_array_record(ArrayRecord({"w": Array(value)}))["w"], value)


def _npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"not an array at all",
        _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}", b"\0" * 8),
        _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", b"\0" * 8),
        _npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"\0" * 8),
        _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)", b"\0" * 8),
        _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", b"\0" * 8, b"\x09\x00"),
        _npy("{'descr': '<f4', 'shape': (2,)}", b"\0" * 8),
    ],
)
def test_bytes_that_are_no_array_are_a_protocol_error(data: bytes) -> None:
    record = ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", data)})
    with pytest.raises(ProtocolError, match="'w' cannot be read"):
        from_array_record(record)


def test_another_format_of_arrays_is_a_protocol_error() -> None:
    good = Array(np.zeros(2, np.float32))
    with pytest.raises(ProtocolError, match="format"):
        from_array_record(ArrayRecord({"w": Array(good.dtype, good.shape, "safetensors", good.data)}))
