"""A question about ranges: a client's update is its histogram, has norm 1 at most, and tells ranges through noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tests.helpers.datasets import manifest
from tests.helpers.errors import raises
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import BATCHED, LOOP, arrays_of, learner_for
from umbel.data import Dataset, offsets_of
from umbel.models import load_for
from umbel.models.ranges import CELLS, EDGES, MISSING, SEEN, answers
from umbel.privacy.mechanisms.randomness import streams
from umbel.protocol.errors import ConfigError, ModelError
from umbel.protocol.ranges import columns_in, in_words, question_of
from umbel.protocol.run_config import RunConfig

COLUMNS = ["cost", "age", "blood pressure"]
UNITS = {
    "target": {"name": "cost", "scale": 10.0},
    "features": [
        {"name": "age", "scale": 2.0, "offset": 50.0},
        {"name": "blood pressure", "scale": 1.0, "offset": 0.0},
        {"name": "blood pressure is missing", "unit": "0 or 1"},
    ],
}
STEP = LocalUpdate(local_epochs=1, step_size=1.0, batch_size=0)
Rows = list[NDArray[np.float32]]  # of each client: features and the target, which is last


def updates(clients: Rows, engine: str = LOOP) -> NDArray[np.float64]:
    """Return what clients train from counts of 0, each (columns, cells)."""
    stacked = np.concatenate(clients)
    data = Dataset(manifest(len(clients), units=UNITS), stacked[:, :-1], stacked[:, -1], offsets_of(map(len, clients)))
    model = load_for(RunConfig(model=question_of(COLUMNS)), data.manifest)
    assert model.module.misfit(data) == ""  # type: ignore[operator]
    learner = learner_for(model, "cpu", engine)
    cohort = Cohort.gather(data, range(len(clients)), learner.device)
    start = learner.tensors({name: value[None] for name, value in model.initial(0).items()})
    chosen = learner.choose(start, cohort)
    trained, _ = learner.train(start, chosen, cohort, STEP, streams(0, "shuffle", 1, range(len(clients))))
    return arrays_of(trained)["counts"].astype(np.float64)


def shares(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the shares of a client's rows by hand: (columns, cells)."""
    numbers = np.float32([10, 2, 1]) * rows[:, [3, 0, 1]] + np.float32([0, 50, 0])
    found = np.zeros((3, CELLS))
    for row, lacks in zip(numbers, rows[:, 2], strict=True):
        for j, number in enumerate(row.tolist()):
            missing = math.isnan(number) or (j == 2 and lacks > 0)
            found[j, MISSING if missing else 1 + sum(number > edge for edge in EDGES)] += 1 / len(rows)
    return found


WILD = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e30, -3.4e38, math.inf, -math.inf, math.nan, 1.0, 2.0**40])
CLIENT = st.integers(1, 6).flatmap(
    lambda rows: hnp.arrays(np.float32, (rows, 4), elements=WILD | st.floats(-1e6, 1e6, width=32))
)


@settings(deadline=None, max_examples=50)
@given(st.lists(CLIENT, min_size=1, max_size=3))
def test_an_update_is_the_histogram_and_its_norm_is_1_at_most(clients: Rows) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = np.stack([shares(rows) for rows in clients])
    found = updates(clients)
    np.testing.assert_allclose(found, wanted / math.sqrt(3), atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=2), 1 / math.sqrt(3), atol=1e-6)
    assert (np.linalg.norm(found.reshape(len(found), -1), axis=1) <= 1 + 1e-6).all()


def test_the_norm_is_reached_and_two_clients_lie_within_two_clip_norms() -> None:
    """Brute force over all pairs of clients of two rows, whose numbers are at both ends, at 0 and missing."""
    values = np.float32([-3e38, 0, 7, 3e38, np.nan])
    rows = [np.float32([[a] * 2 + [0, a], [b] * 2 + [0, b]]) for a in values for b in values]
    found = updates(rows).reshape(len(rows), -1)
    assert np.linalg.norm(found, axis=1).max() == pytest.approx(1, abs=1e-6)
    apart = np.linalg.norm(found[:, None] - found, axis=2)
    assert apart.max() == pytest.approx(math.sqrt(2), abs=1e-6)


def test_batches_compute_the_same() -> None:
    generator = np.random.default_rng(0)
    clients = [np.float32(generator.normal(0, 50, (rows, 4))) for rows in (3, 1, 9)]
    np.testing.assert_allclose(updates(clients, BATCHED), updates(clients), atol=1e-7)


def test_ranges_are_read_where_the_noise_allows_it() -> None:
    generator, clients, spread = np.random.default_rng(0), 2000, 30.0
    cell = {number: 1 + int(np.searchsorted(EDGES, number)) for number in (-3.0, 0.0, 40.0, 100.0, 1e30)}
    counts = np.zeros((300, CELLS))
    counts[0, [cell[-3.0], cell[0.0], cell[40.0]]] = 600, 300, 700
    counts[0, [MISSING, cell[100.0], cell[1e30]]] = 380, 10, 10  # a few clients lie far out
    noisy = counts + generator.normal(0, spread, counts.shape)
    [found, *nothing] = answers([str(number) for number in range(300)], noisy, clients, spread)
    assert (found.low, found.middle, found.high) == (-4, 0, 64)
    assert found.missing == pytest.approx(0.19, abs=0.06)
    assert found.clients == pytest.approx(1620, abs=120)
    # Noise alone makes a range in one of 280 columns.
    assert sum(one.low < one.high for one in nothing) <= 6
    assert SEEN * spread > 100


@pytest.mark.parametrize("sites", [1, 3])
def test_a_wild_client_moves_no_end_that_more_clients_hold(sites: int) -> None:
    """A client may put its whole clip norm on one cell of one column: that is sqrt(d) there, and ends need more."""
    counts = np.zeros((1, CELLS))
    counts[0, 1 + np.searchsorted(EDGES, [3.0, 20.0])] = 500
    before = answers(["x"], counts, 1000, 10.0)
    counts[0, -1] += sites * math.sqrt(10)
    assert answers(["x"], counts, 1000, 10.0) == before


def test_a_question_has_a_name_for_programs_and_one_for_people() -> None:
    name = question_of(COLUMNS)
    assert name == "ranges columns=cost,age,blood%20pressure"
    assert columns_in(name) == COLUMNS
    assert columns_in("linear inputs=2 outputs=1") == []
    assert in_words(name).startswith("ranges of cost, age, blood pressure: ")
    assert columns_in(question_of(["a,b =c", "Größe"])) == ["a,b =c", "Größe"]
    for odd in ("ranges", "ranges columns=", "ranges columns=a,a", "ranges columns=a hidden=2", "ranges columns=a,"):
        with raises(ConfigError, "config.question"):
            columns_in(odd)


def test_data_without_the_column_are_refused_by_name() -> None:
    with raises(ModelError, "model.no-column", "weight", "age"):
        load_for(RunConfig(model=question_of(["weight"])), manifest(2, units=UNITS))
    images = Dataset(manifest(1), np.zeros((2, 3, 3), np.float32), np.zeros(2, np.float32), np.array([0, 2]))
    assert load_for(RunConfig(model=question_of(["age"])), manifest(2, units=UNITS)).module.misfit(images)  # type: ignore[operator]
