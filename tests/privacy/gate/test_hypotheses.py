"""A tripwire for models that no honest server sends; whoever knows of it steps over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.examples import examples
from umbel import models
from umbel.privacy.gate.hypotheses import degenerate, repeated
from umbel.protocol.arrays import Arrays

GOOD = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def hypotheses(*rows: Any, name: str = "items") -> Arrays:
    return {name: np.array(rows, np.float32)}


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        *((hypotheses(np.broadcast_to(row, (3, 2))), "items") for row in (0.0, -7.5, [1.0, -2.0])),
        (hypotheses(GOOD, np.zeros((3, 2))), "items"),  # one among others
        (hypotheses(GOOD, GOOD + 1), ""),
        (hypotheses(GOOD, name="first") | hypotheses(np.ones((3, 2)), name="second"), "second"),
        (hypotheses([[1, 2], [1, 2], [1, 3]]), ""),  # two rows alike among others
        # Numbers, single rows and biases may be constant: biases of zero are in many a fresh network.
        *(({"part": np.zeros((2, *shape), np.float32)}, "") for shape in ((), (3,), (1, 4))),
        # Matrices of one column, and convolutions, may not.
        *(({"part": np.full((2, *shape), 0.5, np.float32)}, "part") for shape in ((4, 1), (5, 2, 3, 3))),
        # Jitter steps over the tripwire, and is as good for the attack; unless it is too small to matter.
        (hypotheses(1e-3 * np.random.default_rng(0).standard_normal((3, 2))), ""),
        (hypotheses(1e-8 * GOOD), "items"),
    ],
)
def test_an_array_whose_rows_are_all_alike_in_a_hypothesis_is_degenerate(arrays: Arrays, found: str) -> None:
    assert degenerate(arrays) == found


@pytest.mark.parametrize("name", [*models.MODELS, "factors items=20 size=4"])
@settings(max_examples=examples(5))
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
