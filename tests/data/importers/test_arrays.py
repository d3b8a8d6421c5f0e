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


def test_vectors_of_booleans_stay_0_and_1_and_it_is_said() -> None:
    data = made(X, X > 4, validation=0)
    assert (set(np.unique(data.dataset.targets)), data.manifest.loss) == ({0, 1}, "mse")
    assert data.manifest.model == "linear inputs=2 outputs=2"
    assert fits(data)
    assert data.notes == (
        "The target's false and true are stored as the numbers 0 and 1, a vector a row, for the loss mse.",
    )
    assert "stored as -1 and 1" in made(X, X[:, 0] > 4).notes[0]


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
        (X, X.astype(int), {}, ("data.vectors", "(6, 2)", "whole numbers", "floats")),
        (X, X.astype(str), {}, ("data.vectors", "(6, 2)", "texts")),
        (X, ["n", "y", "n", None, "y", "n"], {}, ("data.missing-value", "target 3")),
        (X, ["n", "y", "n", np.nan, "y", "n"], {}, ("data.missing-value", "target 3")),
        (X, np.arange(6).astype("datetime64[D]"), {}, ("data.not-numbers", "datetime64")),
    ],
)
def test_what_does_not_fit_is_refused(features: Any, targets: Any, options: Any, reason: tuple[str, ...]) -> None:
    with raises(DatasetError, *reason):
        made(features, targets, **options)


@pytest.mark.parametrize("nobody", [None, np.nan, pd.NA])
def test_rows_without_a_client_are_no_client_of_their_own(nobody: Any) -> None:
    for who in (["a", "a", "b", "b", nobody, nobody], [1.0, 1.0, 2.0, 2.0, nobody, nobody]):
        with raises(DatasetError, "data.missing-value", "row 4"):
            umbel.from_arrays(X, X[:, 0], client=who)


def test_a_masked_client_is_missing() -> None:
    rows = np.zeros((4, 2))
    with raises(DatasetError, "data.missing-value", "row 1"):
        umbel.from_arrays(rows, rows[:, 0], client=np.ma.masked_equal([5, -1, 7, 8], -1))
    whole = umbel.from_arrays(rows, rows[:, 0], client=np.ma.masked_equal([5, -1, 7, 8], 9))
    assert sorted(whole.dataset.names) == ["-1", "5", "7", "8"]


@pytest.mark.parametrize(("other", "told"), [("North ", True), ("south", False)])
def test_names_that_may_be_of_one_client_are_noted(other: str, told: bool) -> None:
    data = umbel.from_arrays(np.zeros((4, 1)), np.zeros(4), client=["north", other] * 2)
    assert any("two clients" in note for note in data.notes) == told


@pytest.mark.parametrize("which", ["features", "targets"])
def test_masked_values_are_missing(which: str) -> None:
    arrays = {"features": np.ones((4, 2)), "targets": np.ones(4)}
    arrays[which] = np.ma.masked_array(arrays[which], arrays[which] > 0)
    with raises(DatasetError, "data.missing-value", which):
        umbel.from_arrays(**arrays, client=list("aabb"))


def test_an_array_with_a_mask_of_nothing_is_an_array() -> None:
    rows = np.ma.masked_array(np.ones((4, 2)), np.zeros((4, 2), bool))
    assert umbel.from_arrays(rows, np.ones(4), client=list("aabb")).dataset.features.shape == (4, 2)


def test_rows_of_unequal_lengths_are_no_array() -> None:
    with raises(DatasetError, "data.not-numbers", "features"):
        umbel.from_arrays([[1.0, 2.0], [3.0]], [1.0, 2.0], client=list("ab"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("classes", "told"), [([0, 1, 2, 1], False), ([1, 2, 1, 2], True), ([0, 0, 0, 0], True)])
def test_classes_without_rows_are_noted(classes: list[int], told: bool) -> None:
    notes = umbel.from_arrays(np.ones((4, 2)), classes, client=list("aabb")).notes
    assert any("Classes with rows" in note for note in notes) == told
    names = umbel.from_arrays(np.ones((4, 2)), classes, client=list("aabb"), classes=["x", "y", "z"]).notes
    assert not any("Classes with rows" in note for note in names), "whose names say that there are more"


def test_numbers_held_as_objects_are_numbers() -> None:
    """As of a DataFrame's column of mixed types."""
    assert made(X, np.array([1.5, 2, 3.5, 4, 5, 6], object)).manifest.loss == "mse"
    assert made(X, np.array([True, False] * 3, object)).manifest.loss == "log"


def test_numbers_that_are_whole_are_numbers_when_that_is_said() -> None:
    assert made(TOKENS, X[:, 0], tokens=False).dataset.features.dtype == np.float32


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


def test_a_folder_a_client_and_a_folder_a_class(folder: Path) -> None:
    data = umbel.from_image_folder(folder, validation=["bert"])
    features, targets = data.dataset.client(0)
    assert features.shape == (2, 1, 4, 3)
    assert features.dtype == np.uint8
    assert (features[:, 0, 0, 0].tolist(), targets.tolist()) == ([10, 20], [0, 1])
    assert data.manifest.units["target"]["categories"] == ["cat", "dog"]
    assert (data.manifest.feature_scale, data.manifest.model) == (1 / 255, "linear inputs=12 outputs=2")


def test_classes_alone_with_a_partitioner(folder: Path) -> None:
    data = umbel.from_image_folder(folder / "anna", client=umbel.Uniform(2), validation=0)
    assert data.manifest.clients == 2


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


@pytest.mark.parametrize("numbers", [np.uint16, np.int32])
def test_images_of_more_than_8_bits_are_refused_and_not_clipped(folder: Path, numbers: type[np.generic]) -> None:
    Image.fromarray(np.full((4, 3), 4000, numbers)).save(folder / "anna" / "cat" / "9.tiff")
    with raises(DatasetError, "data.bit-depth", "9.tiff"):
        umbel.from_image_folder(folder)


def test_what_is_no_image_is_named(folder: Path) -> None:
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
