"""A cohort holds the rows of the asked clients and no others, and each goes through its own in an order of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.helpers.cohorts import CPU
from tests.helpers.datasets import manifest
from umbel.client.cohort import Cohort, LocalUpdate, Schedule
from umbel.data import Dataset, offsets_of
from umbel.privacy.mechanisms.randomness import streams

# --- reading a dataset

# Three clients with 2, 1 and 3 rows; row i holds (2 i, 2 i + 1) and the target 10 i.
DATASET = Dataset(
    manifest(2, 1),
    np.arange(12, dtype=np.float64).reshape(6, 2),
    np.arange(0, 60, 10, dtype=np.float64),
    offsets_of([2, 1, 3]),
)


def test_clients_are_gathered_in_the_order_asked() -> None:
    cohort = Cohort.gather(DATASET, [2, 0], CPU)
    assert (len(cohort), cohort.lengths.tolist(), cohort.starts.tolist()) == (2, [3, 2], [0, 3])
    assert cohort.features.tolist() == [[6, 7], [8, 9], [10, 11], [0, 1], [2, 3]]
    assert cohort.targets.tolist() == [30, 40, 50, 0, 10]
    assert (cohort.features.dtype, cohort.targets.dtype) == (torch.float32, torch.float32)
    nobody = Cohort.gather(DATASET, [], CPU)
    assert (len(nobody), nobody.features.shape, nobody.targets.shape) == (0, (0, 2), (0,))
    part = Cohort.gather(DATASET, [2, 0, 1], CPU).part(slice(1, 3))
    assert (part.lengths.tolist(), part.starts.tolist(), part.targets.tolist()) == ([2, 1], [0, 2], [0, 10, 20])


def test_images_kept_as_bytes_are_scaled_and_classes_are_whole_numbers() -> None:
    images = np.array([0, 51, 255], np.uint8).reshape(3, 1, 1)
    dataset = Dataset(manifest(2, feature_scale=1 / 255), images, np.array([7, 61, 0], np.uint8), offsets_of([1, 2]))
    cohort = Cohort.gather(dataset, [1, 0], CPU)
    assert cohort.features.dtype == torch.float32
    np.testing.assert_allclose(cohort.features.flatten(), [0.2, 1, 0], rtol=1e-6)
    assert cohort.targets.dtype == torch.int64
    assert cohort.targets.tolist() == [61, 0, 7]


def test_tokens_reach_the_model_as_integers() -> None:
    tokens = np.array([[2**24 + 1, 3], [0, 1], [5, 6]], np.int32)  # the first is none of the numbers of 32 bits
    data = Dataset(manifest(2, tokens=2**25), tokens, tokens, offsets_of([2, 1]))
    cohort = Cohort.gather(data, [1, 0], CPU)
    assert (cohort.features.dtype, cohort.targets.dtype) == (torch.int64, torch.int64)
    assert cohort.features.tolist() == [[5, 6], [2**24 + 1, 3], [0, 1]]


def test_no_rows_but_those_of_the_asked_are_read() -> None:
    class Watched:
        """An array that remembers which rows were read."""

        read: list[int]

        def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[Any]:
            self.read = rows.tolist()
            array: NDArray[Any] = DATASET.features[rows]
            return array

    watched: Any = Watched()
    Cohort.gather(Dataset(DATASET.manifest, watched, DATASET.targets, DATASET.offsets), [2, 1], CPU)
    assert watched.read == [3, 4, 5, 2]


# --- passes and minibatches


def test_no_more_is_drawn_than_the_pass_that_is_gone_through() -> None:
    """Memory for passes times rows would tell the number of rows to a server that names the passes."""
    schedule = Schedule.draw(np.array([5, 3]), LocalUpdate(2**31, 0.1, 2), streams(1, "shuffle", 1, [0, 1]))
    assert next(schedule.of(0).minibatches(CPU)).rows.shape == (1, 2)
    assert next(schedule.minibatches(CPU)).rows.shape == (2, 2)


def test_passes_beyond_so_many_examples_are_left_out() -> None:
    """Those that a pass begins: a step of 2 rows counts 2, an epoch of 5 rows 5, and there is one pass at least."""
    lengths = np.array([5, 2, 30])
    for update, expected in (
        (LocalUpdate(9, 0.1, 2, max_examples=12), [2, 6, 1]),
        (LocalUpdate(9, 0.1, 2, 8, max_examples=12), [6, 6, 6]),
        (LocalUpdate(9, 0.1, 0, 8, max_examples=12), [2, 6, 1]),
        (LocalUpdate(0, 0.1, 2, max_examples=12), [0, 0, 0]),
        (LocalUpdate(3, 0.1, 2), [3, 3, 3]),
    ):
        schedule = Schedule.draw(lengths, update, streams(1, "shuffle", 1, range(3)))
        counts = [step.known for step in schedule.minibatches(CPU)]
        assert all(count.any() for count in counts), "and nobody waits for a client that is through"
        examples = np.sum(counts, axis=0) if counts else np.zeros(3)
        size = [update.size(length) if update.local_steps else length for length in lengths.tolist()]
        assert examples.tolist() == np.multiply(size, expected).tolist()
