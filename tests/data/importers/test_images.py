"""A folder of images becomes a dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import umbel
from tests.helpers.errors import raises
from umbel.protocol.errors import DatasetError


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
    assert features.shape == (2, 4, 3)
    assert features.dtype == np.uint8
    assert (features[:, 0, 0].tolist(), targets.tolist()) == ([10, 20], [0, 1])
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
    assert umbel.from_image_folder(tmp_path, validation=0, colour=False).dataset.features.shape == (2, 4, 3)


def test_sizes_must_agree_or_are_brought_to_one(folder: Path) -> None:
    save(folder / "bert" / "cat" / "3.png", 40, (8, 8))
    with raises(DatasetError, "data.shape", "3.png", "1.png"):
        umbel.from_image_folder(folder)
    data = umbel.from_image_folder(folder, size=(6, 5), validation=0)
    assert data.dataset.features.shape == (4, 6, 5)


def test_what_is_no_image_is_named(folder: Path) -> None:
    (folder / "anna" / "cat" / "9.png").write_text("no")
    with raises(DatasetError, "data.unreadable", "9.png"):
        umbel.from_image_folder(folder)
    with raises(DatasetError, "data.no-rows"):
        umbel.from_image_folder(folder / "anna")
