"""Arrays become datasets: numbers, classes, booleans, images and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import umbel
from tests.helpers.errors import raises
from umbel.data.importers import ClientData
from umbel.models import load
from umbel.models.fit import misfit
from umbel.protocol.errors import DatasetError

WHO = np.repeat(["a", "b", "c"], 2)
X = np.arange(12.0).reshape(6, 2)
TOKENS = np.array([[0, 4, 2], [1, 1, 1], [3, 2, 0], [0, 0, 0], [4, 4, 4], [1, 2, 3]])


def made(features: Any, targets: Any, **options: Any) -> ClientData:
    return umbel.from_arrays(features, targets, client=WHO, **{"validation": 0} | options)


def fits(data: ClientData) -> bool:
    manifest = data.manifest
    return not misfit(load(manifest.model, manifest.loss), data.dataset)


@pytest.mark.parametrize(
    ("targets", "dtype", "loss", "model", "categories"),
    [
        (X[:, 0], np.float32, "mse", "linear inputs=2 outputs=1", None),
        (X, np.float32, "mse", "linear inputs=2 outputs=2", None),
        ([0, 1, 2, 0, 1, 2], np.int64, "cross-entropy", "linear inputs=2 outputs=3", None),
        (["n", "y", "n", "y", "n", "y"], np.int64, "cross-entropy", "linear inputs=2 outputs=2", ["n", "y"]),
        (X[:, 0] > 4, np.int8, "log", "linear inputs=2 outputs=1", ["false", "true"]),
    ],
)
def test_the_target_says_model_and_loss(
    targets: Any, dtype: Any, loss: str, model: str, categories: list[str] | None
) -> None:
    data = made(X, targets)
    assert data.dataset.targets.dtype == dtype
    assert (data.manifest.loss, data.manifest.model) == (loss, model)
    assert data.manifest.units["target"].get("categories") == categories
    assert fits(data)


def test_booleans_are_labels_of_a_margin() -> None:
    data = made(X, X[:, 0] > 4, seed=0)
    who = {name: data.dataset.client(index)[1].tolist() for index, name in enumerate(data.dataset.names)}
    assert who == {"a": [-1, -1], "b": [-1, 1], "c": [1, 1]}


def test_names_of_classes_may_be_given() -> None:
    data = made(X, [0, 1, 0, 1, 0, 1], classes=["no", "yes", "perhaps"])
    assert data.manifest.units["target"]["categories"] == ["no", "yes", "perhaps"]
    assert data.manifest.model == "linear inputs=2 outputs=3"


def test_bytes_are_images() -> None:
    images = np.full((6, 28, 28), 255, np.uint8)
    data = made(images, [0, 1, 2, 0, 1, 9])
    assert data.dataset.features.dtype == np.uint8
    assert (data.manifest.feature_scale, data.manifest.model) == (1 / 255, "cnn10")
    assert made(images[:, :5], [0, 1, 2, 0, 1, 9]).manifest.model == "linear inputs=140 outputs=10"


def test_tokens_stay_integers() -> None:
    data = made(TOKENS, [0, 1, 0, 1, 0, 1], tokens=True)
    assert data.dataset.features.dtype.kind == "i"
    assert (data.manifest.tokens, data.manifest.model) == (5, "")
    assert data.notes == ("The vocabulary of 5 tokens was measured over all clients' rows.",)
    assert made(TOKENS, [0, 1, 0, 1, 0, 1], tokens=50).manifest.tokens == 50


def test_without_targets_the_next_token_is_the_target() -> None:
    data = made(TOKENS, None, tokens=5)
    np.testing.assert_array_equal(data.dataset.features[:, 1], data.dataset.targets[:, 0])
    assert data.dataset.targets.shape == (6, 2)
    assert data.manifest.loss == "cross-entropy"


def test_rows_are_dealt_by_a_partitioner() -> None:
    data = umbel.from_arrays(X, X[:, 0], client=umbel.Uniform(3))
    assert sorted(data.dataset.names) == ["client-0", "client-1", "client-2"]


@pytest.mark.parametrize(
    ("features", "targets", "options", "reason"),
    [
        (TOKENS, X[:, 0], {}, ("data.tokens",)),
        (X, X[:, 0], {"tokens": 5}, ("data.tokens", "float64")),
        (X, None, {}, ("data.tokens",)),
        (X.astype(str), X[:, 0], {}, ("data.not-numbers", "<U32", "umbel.from_dataframe")),
        (X[:, 0], X[:, 0], {}, ("data.shape", "(6,)")),
        (X, [-1, 1, -1, 1, -1, 1], {}, ("data.classes", "-1")),
        (X, [0, 1, 2, 0, 1, 2], {"classes": ["a", "b"]}, ("data.classes",)),
        (X, list("abcabc"), {"classes": ["a", "b"]}, ("data.classes", "'c'")),
        (X[:5], X[:5, 0], {}, ("data.lengths",)),
    ],
)
def test_what_does_not_fit_is_refused(features: Any, targets: Any, options: Any, reason: tuple[str, ...]) -> None:
    with raises(DatasetError, *reason):
        made(features, targets, **options)


def test_numbers_that_are_whole_are_numbers_when_that_is_said() -> None:
    assert made(TOKENS, X[:, 0], tokens=False).dataset.features.dtype == np.float32
