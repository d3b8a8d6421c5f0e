"""A model that does not take a dataset's data says so, for all clients alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from tests.helpers.datasets import manifest
from umbel import models
from umbel.data import Dataset, offsets_of
from umbel.models import LOSSES, METRICS, Model
from umbel.models.fit import misfit


def dataset(features: Any, targets: Any, lengths: Any = (2, 1), **entries: Any) -> Dataset:
    """Return the rows of clients as a dataset."""
    return Dataset(manifest(len(lengths), **entries), np.asarray(features), np.asarray(targets), offsets_of(lengths))


def own(network: Callable[[], nn.Module], loss: str = "mse") -> Model:
    return Model("own", network, LOSSES[loss], METRICS["accuracy" if "entropy" in loss else "rmse"])


def classifier(loss: str = "cross-entropy") -> Model:
    """Return a model of three outputs for rows of two numbers."""
    return own(lambda: nn.Linear(2, 3), loss)


class Squeeze(nn.Module):
    """A network that gives a number for each row, and not a list of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.layer(rows)
        return outputs.squeeze(-1)


class SqueezeAll(Squeeze):
    """A network that loses the rows' axis where there is one row alone."""

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.layer(rows).repeat(1, 3)
        return outputs.squeeze()


ROWS = np.zeros((3, 2), np.float32)
FLAT = partial(nn.Sequential, nn.Linear(2, 3), nn.Flatten(0))


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
    ],
)
def test_data_that_fit(model: Model, targets: Any) -> None:
    rows = np.zeros((3, 3), np.float32) if model.name == "mlp" else ROWS
    assert misfit(model, dataset(rows, targets)) == ""


@pytest.mark.parametrize(
    ("model", "targets", "reason"),
    [
        (models.load("mlp"), [0.5, 1.0, 2.0], "does not take features of shape (2,): "),
        (models.load("linear", "cross-entropy"), [0.5, 1.0, 2.0], "needs classes, which are integers, as targets"),
        (classifier(), [0, 3, 2], "knows only the classes 0 to 2"),
        (classifier(), [0, -1, 2], "knows only the classes 0 to 2"),
        (classifier("mse"), [0.5, 1.0, 2.0], "has 3 outputs, a target is of shape ()"),
        (classifier("mse"), np.zeros((3, 2)), "has 3 outputs, a target is of shape (2,)"),
        (
            own(Squeeze),
            [0.5, 1.0, 2.0],
            "gives two rows outputs of shape (2,), not (2, outputs of a row); let it return",
        ),
        (own(SqueezeAll), np.zeros((3, 3)), "gives one row outputs of shape (3,), not (1, 3); keep the rows' axis"),
        (own(FLAT), [0.5, 1.0, 2.0], "gives two rows outputs of shape (6,), not (2, outputs of a row)"),
        (classifier("margin"), [1, -1, 1], "with loss 'margin' needs one output, and labels of -1 and 1"),
    ],
)
def test_data_that_do_not_fit_are_told(model: Model, targets: Any, reason: str) -> None:
    assert misfit(model, dataset(ROWS, targets)).startswith(reason)


@pytest.mark.parametrize("loss", ["log", "hinge", "margin"])
@pytest.mark.parametrize("labels", [[0.5, -1, 1], [[1], [-1], [1]]], ids=["a number", "an axis too many"])
def test_losses_of_the_margin_need_labels_whatever_the_model(loss: str, labels: Any) -> None:
    """With an axis too many, each score would be compared with the labels of all rows."""
    model = models.load("linear", loss)
    assert misfit(model, dataset(ROWS, [1.0, -1.0, 1.0])) == ""
    reason = f"with loss '{loss}' needs one output, and labels of -1 and 1"
    assert misfit(model, dataset(ROWS, labels)).startswith(reason)


def test_named_classes_need_an_output_each() -> None:
    """A single output, fitted to their numbers, would be read as a score: its sign would name one of two."""
    units = {"target": {"categories": ["a", "b", "c"]}}
    assert misfit(models.load("linear"), dataset(ROWS, [0, 1, 2], units=units)).startswith(
        "needs an output for each of"
    )
    assert misfit(classifier("mse"), dataset(ROWS, [0, 1, 2], units=units)) == ""
    labels = {"target": {"categories": ["false", "true"]}}
    assert misfit(models.load("linear"), dataset(ROWS, [1, -1, 1], units=labels)) == ""


def test_all_clients_are_looked_at() -> None:
    """If training failed at some clients and not at others, that would tell about their data."""
    targets = np.zeros(10_000, np.int64)
    targets[-1] = 3
    assert misfit(classifier(), dataset(np.zeros((10_000, 2), np.float32), targets, (9_999, 1)))


@pytest.mark.parametrize(
    ("size", "reason"), [(5, ""), (4, "does not know all of the tokens from 0 to 4: index out of range")]
)
def test_a_vocabulary_must_be_known_to_the_model(size: int, reason: str) -> None:
    """No client has the last token: whether one fails must not tell which it has."""
    model = own(lambda: nn.Sequential(nn.Embedding(size, 2), nn.Flatten(), nn.Linear(6, 3)), "cross-entropy")
    assert misfit(model, dataset(np.zeros((3, 3), np.int64), [0, 1, 2], tokens=5)).startswith(reason)
    assert bool(misfit(model, dataset(np.full((3, 3), 0.5), [0, 1, 2]))), "numbers are no tokens"
    scaled = dataset(np.zeros((3, 3), np.int64), [0, 1, 2], feature_scale=0.5)
    assert "feature_scale" in misfit(model, scaled)


# --- a network that looks for itself


@pytest.mark.parametrize("labels", [np.array([1, -1, 1], kind) for kind in (np.int8, np.int64, np.float32)])
def test_preferences_fit_the_factors(labels: Any) -> None:
    # Two clients may label the same item.
    factors, items = models.load("factors items=3 size=2"), [[0], [2], [2]]
    assert misfit(factors, dataset(items, labels)) == ""
    assert "feature_scale = 1" in misfit(factors, dataset(items, labels, feature_scale=0.5))


@pytest.mark.parametrize(
    ("numbers", "labels", "reason"),
    [
        ([[0], [1], [2]], [1, 0, 1], "needs labels of -1 and 1"),
        ([[0], [1], [2]], [1.0, -0.5, 1.0], "needs labels of -1 and 1"),
        ([[0], [3], [2]], [1, -1, 1], "knows only the items 0 to 2"),
        ([[0], [-1], [2]], [1, -1, 1], "knows only the items 0 to 2"),
        ([[0], [1.5], [2]], [1, -1, 1], "knows only the items 0 to 2"),
        ([[1], [1], [2]], [1, -1, 1], "takes each item at most once from a client"),
        ([[0, 1], [1, 2], [2, 0]], [1, -1, 1], "needs rows with one feature, an item's number, and one label"),
        ([[0], [1], [2]], [[1], [-1], [1]], "needs rows with one feature, an item's number, and one label"),
    ],
)  # fmt: skip
def test_preferences_that_do_not_fit_the_factors_are_told(numbers: Any, labels: Any, reason: str) -> None:
    assert misfit(models.load("factors items=3 size=2"), dataset(numbers, labels)) == reason
