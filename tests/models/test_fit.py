"""A model that does not take a dataset's data says so, for all clients alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.datasets import manifest
from tests.helpers.models import own
from umbel import models
from umbel.data import Dataset, offsets_of
from umbel.models import Model
from umbel.models.fit import misfit


def dataset(features: Any, targets: Any, lengths: Any = (2, 1), **entries: Any) -> Dataset:
    return Dataset(manifest(len(lengths), **entries), np.asarray(features), np.asarray(targets), offsets_of(lengths))


def classifier(loss: str = "cross-entropy") -> Model:
    return own(lambda: nn.Linear(2, 3), loss)


class Shaped(nn.Linear):
    """A dense layer whose outputs a function brings into another shape, if only where there is one row alone."""

    def __init__(self, outputs: int, shape: Callable[[Tensor], Tensor]) -> None:
        super().__init__(2, outputs)
        self.shape = shape

    def forward(self, rows: Tensor) -> Tensor:
        return self.shape(super().forward(rows))


ROWS = np.zeros((3, 2), np.float32)
FACTORS = models.load("factors items=3 size=2")
ITEMS = [[0], [1], [2]]


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        (models.load("linear"), [0.5, 1.0, 2.0]),
        (models.load("linear"), [[0.5], [1.0], [2.0]]),
        (models.load("linear"), [1, 2, -3]),
        (models.load("linear", "hinge"), [1, -1, 1]),
        (models.load("linear", "log"), [1.0, -1.0, 1.0]),
        (classifier(), [0, 1, 2]),
        (classifier("mse"), [0, 1, 2]),
        (classifier("mse"), np.zeros((3, 3))),
        (models.load("mlp"), [0.5, 1.0, 2.0]),
        *((FACTORS, np.array([1, -1, 1], kind)) for kind in (np.int8, np.int64, "f4")),
    ],
)
def test_data_that_fit(model: Model, targets: Any) -> None:
    """Two clients may label the same item."""
    rows = {"mlp": np.zeros((3, 3), np.float32), FACTORS.name: [[0], [2], [2]]}.get(model.name, ROWS)
    assert misfit(model, dataset(rows, targets)) == ""


def test_numbers_of_items_are_not_scaled() -> None:
    assert "feature_scale = 1" in misfit(FACTORS, dataset(ITEMS, [1, -1, 1], feature_scale=0.5))


@pytest.mark.parametrize(
    ("model", "features", "targets", "part"),
    [
        (models.load("mlp"), ROWS, [0.5, 1.0, 2.0], "(2,)"),
        (models.load("linear", "cross-entropy"), ROWS, [0.5, 1.0, 2.0], "integers"),
        (classifier(), ROWS, [0, 3, 2], "0 to 2"),
        (classifier(), ROWS, [0, -1, 2], "0 to 2"),
        (classifier("mse"), ROWS, [0.5, 1.0, 2.0], "()"),
        (classifier("mse"), ROWS, np.zeros((3, 2)), "(2,)"),
        (
            own(partial(Shaped, 1, lambda outputs: outputs.squeeze(-1)), "mse"),
            ROWS,
            [0.5, 1.0, 2.0],
            "(2, outputs of a row)",
        ),
        (own(partial(Shaped, 3, torch.squeeze), "mse"), ROWS, np.zeros((3, 3)), "(1, 3)"),
        (own(partial(Shaped, 3, torch.flatten), "mse"), ROWS, [0.5, 1.0, 2.0], "(6,)"),
        (own(partial(nn.GRU, 2, 3), "mse"), ROWS, np.zeros((3, 3)), "tuple"),
        (classifier("margin"), ROWS, [1, -1, 1], "-1 and 1"),
        # With an axis too many, each score would be compared with the labels of all rows.
        *(
            (models.load("linear", loss), ROWS, labels, "-1 and 1")
            for loss in ("log", "hinge", "margin")
            for labels in ([0.5, -1, 1], [[1], [-1], [1]])
        ),
        (FACTORS, ITEMS, [1, 0, 1], "-1 and 1"),
        (FACTORS, ITEMS, [1.0, -0.5, 1.0], "-1 and 1"),
        (FACTORS, [[0], [3], [2]], [1, -1, 1], "0 to 2"),
        (FACTORS, [[0], [-1], [2]], [1, -1, 1], "0 to 2"),
        (FACTORS, [[0], [1.5], [2]], [1, -1, 1], "0 to 2"),
        (FACTORS, [[1], [1], [2]], [1, -1, 1], "at most once"),
        (FACTORS, [[0, 1], [1, 2], [2, 0]], [1, -1, 1], "one feature"),
        (FACTORS, ITEMS, [[1], [-1], [1]], "one label"),
    ],
)
def test_data_that_do_not_fit_are_told(model: Model, features: Any, targets: Any, part: str) -> None:
    assert part in misfit(model, dataset(features, targets))


def test_named_classes_need_an_output_each() -> None:
    """A single output, fitted to their numbers, would be read as a score: its sign would name one of two."""
    units = {"target": {"categories": ["a", "b", "c"]}}
    assert misfit(models.load("linear"), dataset(ROWS, [0, 1, 2], units=units))
    assert misfit(classifier("mse"), dataset(ROWS, [0, 1, 2], units=units)) == ""
    labels = {"target": {"categories": ["false", "true"]}}
    assert misfit(models.load("linear"), dataset(ROWS, [1, -1, 1], units=labels)) == ""


def test_all_clients_are_looked_at() -> None:
    """If training failed at some clients and not at others, that would tell about their data."""
    targets = np.zeros(10_000, np.int64)
    targets[-1] = 3
    assert misfit(classifier(), dataset(np.zeros((10_000, 2), np.float32), targets, (9_999, 1)))


@pytest.mark.parametrize("size", [4, 5])
def test_a_vocabulary_must_be_known_to_the_model(size: int) -> None:
    """No client has the last token: whether one fails must not tell which it has."""
    model = own(lambda: nn.Sequential(nn.Embedding(size, 2), nn.Flatten(), nn.Linear(6, 3)))
    assert (misfit(model, dataset(np.zeros((3, 3), np.int64), [0, 1, 2], tokens=5)) == "") == (size == 5)
    assert bool(misfit(model, dataset(np.full((3, 3), 0.5), [0, 1, 2]))), "numbers are no tokens"
    scaled = dataset(np.zeros((3, 3), np.int64), [0, 1, 2], feature_scale=0.5)
    assert "feature_scale" in misfit(model, scaled)
