"""A tripwire for models that no honest server sends; whoever knows of it steps over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel import models
from umbel.privacy.gate.hypotheses import degenerate, repeated
from umbel.protocol.arrays import Arrays

GOOD = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def hypotheses(*rows: Any, name: str = "items") -> Arrays:
    return {name: np.array(rows, np.float32)}


@pytest.mark.parametrize("value", [0.0, -7.5, [1.0, -2.0]])
def test_rows_that_are_all_alike_are_degenerate(value: Any) -> None:
    assert degenerate(hypotheses(np.broadcast_to(value, (3, 2)))) == "items"


def test_one_degenerate_hypothesis_among_others_is_found() -> None:
    assert degenerate(hypotheses(GOOD, np.zeros((3, 2)))) == "items"
    assert degenerate(hypotheses(GOOD, GOOD + 1)) == ""


def test_the_array_is_named() -> None:
    arrays = hypotheses(GOOD, name="first") | hypotheses(np.ones((3, 2)), name="second")
    assert degenerate(arrays) == "second"


def test_two_rows_alike_among_others_are_not_degenerate() -> None:
    assert degenerate(hypotheses([[1, 2], [1, 2], [1, 3]])) == ""


@pytest.mark.parametrize("shape", [(), (3,), (1, 4)])
def test_numbers_biases_and_single_rows_may_be_constant(shape: tuple[int, ...]) -> None:
    """As biases of zero are in many a fresh network."""
    assert degenerate({"part": np.zeros((2, *shape), np.float32)}) == ""


@pytest.mark.parametrize("shape", [(4, 1), (5, 2, 3, 3)])
def test_matrices_of_one_column_and_convolutions_may_not(shape: tuple[int, ...]) -> None:
    assert degenerate({"part": np.full((2, *shape), 0.5, np.float32)}) == "part"


def test_jitter_steps_over_it() -> None:
    """It is a tripwire: a little noise on the zeros is enough, and as good for the attack."""
    jitter = 1e-3 * np.random.default_rng(0).standard_normal((3, 2))
    assert degenerate(hypotheses(jitter)) == ""


def test_jitter_too_small_to_matter_does_not() -> None:
    assert degenerate(hypotheses(1e-8 * GOOD)) == "items"


@pytest.mark.parametrize("name", [*models.MODELS, "factors items=20 size=4"])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_fresh_model_is_never_degenerate(name: str, seed: int) -> None:
    fresh = models.load(name).initial(seed)
    assert degenerate({name: value[None] for name, value in fresh.items()}) == ""


def test_the_very_same_is_found_and_nothing_else() -> None:
    state = RecordDict()
    first, other = hypotheses(GOOD), hypotheses(GOOD + np.float32(1e-6))
    assert [repeated(arrays, state) for arrays in (first, other, first, other)] == [False, False, True, True]
    assert [repeated(arrays, RecordDict()) for arrays in (first, other)] == [False, False], "another node's state"


def test_of_two_arrays_both_count() -> None:
    state = RecordDict()
    weight = hypotheses(GOOD, name="weight")
    assert not repeated(weight | hypotheses([0, 1], name="bias"), state)
    assert not repeated(weight | hypotheses([0, 2], name="bias"), state)
    assert repeated(weight | hypotheses([0, 1], name="bias"), state)


def test_memory_is_bounded() -> None:
    state = RecordDict()
    for number in range(1001):
        repeated(hypotheses([number]), state)
    ((_, record),) = state.config_records.items()
    assert isinstance(record, ConfigRecord)
    assert [len(value) for value in record.values() if isinstance(value, list)] == [1000]
    assert repeated(hypotheses([1]), state)
    assert not repeated(hypotheses([0]), state), "the oldest is forgotten"
