"""The recipe of FEMNIST's digits as public features: whose images are public, who is a client, and what it gets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.datasets.conftest import LAB, Recipe, assert_same_rows
from tests.lab.datasets.test_qmnist_features import strokes

pytestmark = pytest.mark.rest

recipe = Recipe("femnist_features", LAB)
module = recipe.module

WRITERS, EACH = 10, 30
"""Each writer has this many digits, 0 and 1 by turns, and a letter."""


def write_leaf(folder: Path, writers: range = range(WRITERS), digits: int = EACH) -> Path:
    """Write bars by some writers as LEAF does, in one file."""
    folder.mkdir()
    data = {}
    for writer in writers:
        grey = strokes(digits + 1, writer).reshape(digits + 1, -1) / 255
        data[f"f{writer}"] = {"x": grey.tolist(), "y": [*(row % 2 for row in range(digits)), 10]}
    counts = [len(own["y"]) for own in data.values()]
    content = {"users": [*data], "num_samples": counts, "user_data": data}
    (folder / "all_data_0.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def leaf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_leaf(tmp_path_factory.mktemp("leaf") / "data")


def test_a_fifth_of_the_writers_is_public(leaf: Path) -> None:
    found = module.femnist.read_leaf(leaf)
    public, others = module.split_off(found, 3)
    assert len(np.unique(public.writers)) == 2
    assert len(np.unique(others.writers)) == 8
    assert not {*public.writers} & {*others.writers}
    for part in (public, others):
        assert np.unique(part.labels).tolist() == [0, 1], "no letters"
        assert np.unique(part.writers, return_counts=True)[1].tolist() == [EACH] * len(np.unique(part.writers))
    assert {*module.split_off(found, 4)[0].writers} != {*public.writers}, "another seed draws others"


@pytest.mark.parametrize("features", ["2", "5"])
def test_clients_are_the_other_writers_with_features_of_their_images(leaf: Path, tmp_path: Path, features: str) -> None:
    dataset = recipe.made(tmp_path / "out", "--leaf", leaf, "--features", features, "--seed", "3")
    manifest = dataset.manifest
    assert (manifest.split, np.diff(dataset.offsets).tolist()) == ({"train": 7, "validation": 1}, [EACH] * 8)
    assert (manifest.feature_scale, manifest.model) == (1.0, f"softmax features={features} classes=10")
    assert dataset.features.shape == (8 * EACH, int(features))
    public, others = module.split_off(module.femnist.read_leaf(leaf), 3)
    about = module.About("femnist_features", "any", "cnn", "", "")
    same, images, classes, offsets = module.build(others, about, None, 3)
    np.testing.assert_array_equal(dataset.targets, classes)
    np.testing.assert_array_equal(dataset.offsets, offsets)
    assert manifest.groups == same.groups
    assert 0 < sum(manifest.groups) < 8
    # Bars are upright or level, and a turn makes one the other: features tell the two apart, and know no turn.
    level = images.any(1).sum(1) > 10
    rows = np.array(dataset.features)
    centres = np.stack([rows[level].mean(0), rows[~level].mean(0)])
    nearer = np.square(rows[:, None] - centres).sum(-1).argmin(1) == 0
    assert (nearer == level).mean() > 0.9
    assert f"learnt without labels from {len(public.images)} digits of 2 other writers" in manifest.provenance
    assert "NIST special database 19" in manifest.provenance
    assert "BSD 2-Clause" in manifest.licence


def test_the_order_of_the_writers_plays_no_part(leaf: Path, tmp_path: Path) -> None:
    turned = write_leaf(tmp_path / "leaf", range(WRITERS - 1, -1, -1))
    one, other = (recipe.made(tmp_path / f"{folder.name}-out", "--leaf", folder) for folder in (leaf, turned))
    assert_same_rows(one, other)


def test_too_few_public_digits_are_refused(tmp_path: Path) -> None:
    few = write_leaf(tmp_path / "leaf", digits=2)
    recipe.assert_refused(recipe.run(tmp_path / "out", "--leaf", few), tmp_path / "out", "public images", "all of them")


def test_no_public_writers_are_refused(tmp_path: Path) -> None:
    few = write_leaf(tmp_path / "leaf", range(2))
    recipe.assert_refused(recipe.run(tmp_path / "out", "--leaf", few), tmp_path / "out", "0 digits of public writers")
