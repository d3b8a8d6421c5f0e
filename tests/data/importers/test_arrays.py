"""Arrays become datasets: numbers, classes, booleans, images and tokens; and so does a folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import umbel
from tests.helpers.errors import raises
from umbel.data.importers import ClientData
from umbel.models import load
from umbel.models.fit import misfit
from umbel.protocol.errors import ConfigError, DatasetError
from umbel.protocol.plugins import distrust, import_by_name

WHO = np.repeat(["a", "b", "c"], 2)
X = np.arange(12.0).reshape(6, 2)
TOKENS = np.array([[0, 4, 2], [1, 1, 1], [3, 2, 0], [0, 0, 0], [4, 4, 4], [1, 2, 3]])


def made(features: Any, targets: Any, **options: Any) -> ClientData:
    return umbel.from_arrays(features, targets, **{"client": WHO, "validation": 0} | options)


@pytest.mark.parametrize(
    ("targets", "values", "loss", "outputs", "categories"),
    [
        (X[:, 0], {0, 2, 4, 6, 8, 10}, "mse", 1, None),
        (X[:, 0].astype(object), {0, 2, 4, 6, 8, 10}, "mse", 1, None),  # as of a DataFrame's column of mixed types
        (X, {*range(12)}, "mse", 2, None),
        (X > 4, {0, 1}, "mse", 2, None),
        ([0, 1, 2, 0, 1, 2], {0, 1, 2}, "cross-entropy", 3, None),
        (["n", "y", "n", "y", "n", "y"], {0, 1}, "cross-entropy", 2, ["n", "y"]),
        (X[:, 0] > 4, {-1, 1}, "log", 1, ["false", "true"]),
        ((X[:, 0] > 4).astype(object), {-1, 1}, "log", 1, ["false", "true"]),
    ],
)
def test_the_target_says_model_and_loss(
    targets: Any, values: set[float], loss: str, outputs: int, categories: list[str] | None
) -> None:
    data = made(X, targets)
    assert {*data.dataset.targets.ravel().tolist()} == values
    kinds = {"mse": np.float32, "cross-entropy": np.int64, "log": np.int8}
    assert data.dataset.targets.dtype == kinds[loss]
    assert (data.manifest.loss, data.manifest.model) == (loss, f"linear inputs=2 outputs={outputs}")
    assert data.manifest.units["target"].get("categories") == categories
    assert not misfit(load(data.manifest.model, loss), data.dataset)
    named = made(X, [0, 1, 0, 1, 0, 1], classes=["no", "yes", "perhaps"]).manifest
    assert (named.units["target"]["categories"], named.model[-1]) == (["no", "yes", "perhaps"], "3")


def test_bytes_are_images() -> None:
    images = np.full((6, 28, 28), 255, np.uint8)
    data = made(images, [0, 1, 2, 0, 1, 9])
    assert data.dataset.features.dtype == np.uint8
    assert (data.manifest.feature_scale, data.manifest.model) == (1 / 255, "cnn10")
    assert made(images[:, :5], [0, 1, 2, 0, 1, 9]).manifest.model == "linear inputs=140 outputs=10"


def test_images_are_kept_with_their_channels_first() -> None:
    grey, colour = np.arange(6 * 5 * 7, dtype=np.uint8).reshape(6, 5, 7), np.zeros((6, 5, 7, 3), np.uint8)
    data = made(grey, WHO)
    np.testing.assert_array_equal(data.dataset.features[:, 0].sum(), grey.sum())
    assert data.dataset.features.shape == (6, 1, 5, 7)
    assert data.notes == ("Images of shape (5, 7) have no channel axis; they are stored as (1, 5, 7).",)
    numbers = grey.astype(np.float32)  # may be sequences as well
    assert made(numbers, WHO).dataset.features.shape == (6, 5, 7)
    assert made(numbers, WHO, channels="none").dataset.features.shape == (6, 1, 5, 7)
    colour[..., 2] = 9
    for images in (colour, colour.astype(np.float32)):
        data = made(images, WHO)
        assert data.dataset.features.shape == (6, 3, 5, 7)
        assert np.all(data.dataset.features[:, 2] == 9)
        assert data.notes == ("Images of shape (5, 7, 3) have their channels last; they are stored as (3, 5, 7).",)
    first = made(np.moveaxis(colour, -1, 1), WHO)
    assert (first.dataset.features.shape, first.notes) == ((6, 3, 5, 7), ())


@pytest.mark.parametrize("shape", [(3, 5, 3), (16, 5, 7), (1, 28, 1)])
def test_images_that_do_not_tell_are_refused_until_it_is_said(shape: tuple[int, ...]) -> None:
    images = np.zeros((6, *shape), np.uint8)
    with raises(DatasetError, "data.channels", str(shape), 'channels="first" or channels="last"'):
        made(images, WHO)
    assert made(images, WHO, channels="first").dataset.features.shape == (6, *shape)
    assert made(images, WHO, channels="last").dataset.features.shape == (6, shape[2], *shape[:2])


def test_tokens_stay_integers() -> None:
    data = made(TOKENS, [0, 1, 0, 1, 0, 1], tokens=True)
    assert data.dataset.features.dtype.kind == "i"
    assert (data.manifest.tokens, data.manifest.model) == (5, "")
    assert data.notes == ("The vocabulary of 5 tokens was measured over all clients' rows.",)
    assert made(TOKENS, [0, 1, 0, 1, 0, 1], tokens=50).manifest.tokens == 50
    assert made(TOKENS, X[:, 0], tokens=False).dataset.features.dtype == np.float32


def test_without_targets_the_next_token_is_the_target() -> None:
    data = made(TOKENS, None, tokens=5)
    np.testing.assert_array_equal(data.dataset.features[:, 1], data.dataset.targets[:, 0])
    assert data.dataset.targets.shape == (6, 2)
    assert data.manifest.loss == "cross-entropy"


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
        (X, X.astype(int), {}, ("data.vectors", "(6, 2)", "whole numbers", "floats")),
        (X, X.astype(str), {}, ("data.vectors", "(6, 2)", "texts")),
        (X, ["n", "y", "n", None, "y", "n"], {}, ("data.missing-value", "target 3")),
        (X, ["n", "y", "n", np.nan, "y", "n"], {}, ("data.missing-value", "target 3")),
        (X, np.arange(6).astype("datetime64[D]"), {}, ("data.not-numbers", "datetime64")),
        ([[1.0, 2.0]] * 5 + [[3.0]], X[:, 0], {}, ("data.not-numbers", "features")),
        (np.ma.masked_greater(X, 4), X[:, 0], {}, ("data.missing-value", "features")),
        (X, np.ma.masked_greater(X[:, 0], 4), {}, ("data.missing-value", "targets")),
        *(
            (X, X[:, 0], {"client": who}, ("data.missing-value", "row 4"))
            for nobody in (None, np.nan, pd.NA)
            for who in (["a", "a", "b", "b", nobody, "c"], [1.0, 1.0, 2.0, 2.0, nobody, nobody])
        ),
        (X, X[:, 0], {"client": np.ma.masked_equal([5, -1, 7, 8, 5, 5], -1)}, ("data.missing-value", "row 1")),
    ],
)
def test_what_does_not_fit_is_refused(features: Any, targets: Any, options: Any, reason: tuple[str, ...]) -> None:
    with raises(DatasetError, *reason):
        made(features, targets, **options)


def test_arrays_with_a_mask_of_nothing_are_arrays() -> None:
    rows, who = np.ma.masked_greater(X, 99), np.ma.masked_equal([5, -1, 7, 8, 5, 5], 9)
    data = made(rows, X[:, 0], client=who)
    assert data.dataset.features.shape == (6, 2)
    assert sorted(data.dataset.names) == ["-1", "5", "7", "8"]


@pytest.mark.parametrize(("classes", "told"), [([0, 1, 2] * 2, False), ([1, 2] * 3, True), ([0] * 6, True)])
def test_classes_without_rows_are_noted(classes: list[int], told: bool) -> None:
    assert any("Classes with rows" in note for note in made(X, classes).notes) == told
    names = made(X, classes, classes=["x", "y", "z"]).notes
    assert not any("Classes with rows" in note for note in names), "whose names say that there are more"


# --- a folder of images


def save(path: Path, value: int = 0, size: tuple[int, int] = (4, 3), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (size[1], size[0]), value if mode == "L" else (value, 1, 2)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two clients with images of 4 x 3 pixels, of cats and dogs."""
    save(tmp_path / "anna" / "cat" / "1.png", 10)
    save(tmp_path / "anna" / "dog" / "1.png", 20)
    save(tmp_path / "bert" / "dog" / "2.png", 30)
    (tmp_path / "anna" / "cat" / "notes.txt").write_text("no image")
    return tmp_path


def test_a_folder_a_client_or_a_partitioner_and_a_folder_a_class(folder: Path) -> None:
    assert umbel.from_image_folder(folder / "anna", client=umbel.Uniform(2), validation=0).manifest.clients == 2
    data = umbel.from_image_folder(folder, validation=["bert"])
    features, targets = data.dataset.client(0)
    assert features.shape == (2, 1, 4, 3)
    assert features.dtype == np.uint8
    assert (features[:, 0, 0, 0].tolist(), targets.tolist()) == ([10, 20], [0, 1])
    assert data.manifest.units["target"]["categories"] == ["cat", "dog"]
    assert (data.manifest.feature_scale, data.manifest.model) == (1 / 255, "linear inputs=12 outputs=2")


def test_colours_come_first(tmp_path: Path) -> None:
    save(tmp_path / "anna" / "cat" / "1.png", 10, mode="RGB")
    save(tmp_path / "anna" / "dog" / "1.png", 20)
    data = umbel.from_image_folder(tmp_path, validation=0)
    assert data.dataset.features[:, :, 0, 0].tolist() == [[10, 1, 2], [20, 20, 20]]
    assert umbel.from_image_folder(tmp_path, validation=0, colour=False).dataset.features.shape == (2, 1, 4, 3)


def test_sizes_must_agree_or_are_brought_to_one(folder: Path) -> None:
    save(folder / "bert" / "cat" / "3.png", 40, (8, 8))
    with raises(DatasetError, "data.shape", "3.png", "1.png"):
        umbel.from_image_folder(folder)
    data = umbel.from_image_folder(folder, size=(6, 5), validation=0)
    assert data.dataset.features.shape == (4, 1, 6, 5)


def test_what_is_no_image_of_8_bits_is_named_and_not_clipped(folder: Path) -> None:
    for numbers in (np.uint16, np.int32):
        Image.fromarray(np.full((4, 3), 4000, numbers)).save(folder / "anna" / "cat" / "9.tiff")
        with raises(DatasetError, "data.bit-depth", "9.tiff"):
            umbel.from_image_folder(folder)
    (folder / "anna" / "cat" / "9.tiff").unlink()
    (folder / "anna" / "cat" / "9.png").write_text("no")
    with raises(DatasetError, "data.unreadable", "9.png"):
        umbel.from_image_folder(folder)
    with raises(DatasetError, "data.no-rows"):
        umbel.from_image_folder(folder / "anna")


def test_a_model_that_is_named_here_is_trusted_in_a_run(tmp_path: Path) -> None:
    """Who writes the call names the code; of a folder that was sent it is refused (`umbel.protocol.plugins`)."""
    name = "tests.helpers.strangers:Recurrent"
    distrust(name)
    with raises(ConfigError, "config.untrusted-code", name):
        import_by_name(name)
    umbel.from_arrays(np.zeros((2, 3)), np.zeros(2), client=["a", "b"], model=name)
    assert import_by_name(name).__name__ == "Recurrent"
