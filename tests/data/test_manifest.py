"""A manifest says what the data are; one that does not fit is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.datasets import FEATURES, MANIFEST, OFFSETS, TARGETS, save_manifest
from tests.helpers.errors import raises
from umbel.data import Manifest, open_dataset, read_manifest, write_dataset
from umbel.protocol.errors import DatasetError


def test_train_is_the_number_of_training_clients() -> None:
    assert MANIFEST.train == 2


def test_groups_are_those_of_the_clients_or_unknown(folder: Path) -> None:
    assert read_manifest(folder).groups == []
    write_dataset(folder, MANIFEST.model_copy(update={"groups": [1, 0, 1]}), FEATURES, TARGETS, OFFSETS)
    assert read_manifest(folder).groups == [1, 0, 1]
    # A manifest written before there were groups.
    save_manifest(folder, groups=None)
    assert read_manifest(folder) == MANIFEST


def test_a_manifest_that_is_no_object_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")
    with raises(DatasetError, "data.manifest", f"{folder}/manifest.json"):
        open_dataset(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"modell": "cnn"}, r"the manifest: there is no modell; did you mean model\?"),
        ({"name": None, "split": None}, "the manifest lacks name"),
        ({"split": None}, "the manifest lacks split"),
        ({"split": {"train": 3}}, r'"split" must be {"train": a, "validation": b}, got {\'train\': 3}'),
        ({"split": {"train": 4, "validation": -1}}, r'"split" must be {"train": a, "validation": b}, got {.*-1}'),
        ({"split": {"train": 2, "validation": 1, "test": 0}}, r'"split" must be {"train": a, "validation": b}, got'),
        ({"split": [2, 1]}, r"split must be an object, got \[2, 1\]"),
        ({"split": {"train": 2.0, "validation": 1}}, r"split\.train must be a whole number, got 2\.0"),
        ({"split": {"train": True, "validation": 2}}, r"split\.train must be a whole number, got True"),
        ({"split": {"train": 2, "validation": 2}}, r"split {.*} does not add up to 3 clients"),
        ({"clients": "3"}, "clients must be a whole number of at least 1, got '3'"),
        ({"clients": 0, "split": {"train": 0, "validation": 0}}, "clients must be a whole number of at least 1, got 0"),
        ({"groups": [0, 1]}, r'"groups" must list a group for each of the 3 clients, or none, got 2'),
        ({"groups": [0, 1, 0, 1]}, r'"groups" must list a group for each of the 3 clients, or none, got 4'),
        ({"groups": "012"}, "groups must be a list, got '012'"),
        ({"groups": [0, -1, 0]}, '"groups" must hold whole numbers from 0 on, got -1'),
        ({"groups": [0, 1, 0.5]}, r"groups\.2 must be a whole number, got 0\.5"),
        ({"groups": [0, True, 0]}, r"groups\.1 must be a whole number, got True"),
        ({"model": 3}, "model must be text, got 3"),
        ({"local": ["head"]}, r"local must be text, got \['head'\]"),
        ({"units": []}, r"units must be an object, got \[\]"),
        ({"truth": [["a"]]}, r"truth\.0\.0 must be a number, got 'a'"),
        ({"feature_scale": float("nan")}, "feature_scale must be a finite number, got nan"),
        ({"feature_scale": 1e300}, r"feature_scale must be a 32-bit number other than 0, got 1e\+300"),
        ({"feature_scale": 0.0}, r"feature_scale must be a 32-bit number other than 0, got 0\.0"),
        ({"name": 17}, "name must be text, got 17"),
        ({"name": "\ud800"}, "the manifest cannot be written as JSON: 'utf-8' codec can't encode"),
        ({"truth": [[float("inf")]]}, r"truth\.0\.0 must be a finite number, got inf"),
        ({"units": {"target": 5}}, '"units" must say of the target an object, got 5'),
        ({"units": {"target": {"name": 5}}}, r"units\.target\.name must be text, got 5"),
        ({"units": {"target": {"unit": None}}}, r"units\.target\.unit must be text, got None"),
        (
            {"units": {"target": {"scale": "10"}}},
            r"units\.target\.scale must be a finite number other than 0, got '10'",
        ),
        ({"units": {"target": {"scale": float("nan")}}}, r"units\.target\.scale must be a finite number .*, got nan"),
        ({"units": {"items": float("inf")}}, "the manifest cannot be written as JSON: Out of range float"),
        ({"self": 1}, "the manifest: there is no self"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(folder: Path, changes: dict[str, Any], reason: str) -> None:
    save_manifest(folder, **changes)
    with pytest.raises(DatasetError, match=f"{folder}/manifest.json: {reason}"):
        open_dataset(folder)


def test_a_manifest_is_checked_where_it_is_made() -> None:
    with pytest.raises(DatasetError, match="does not add up to 3 clients"):
        Manifest(name="small", clients=3, split={"train": 3, "validation": 1})


def test_what_is_left_out_is_empty() -> None:
    assert (MANIFEST.model, MANIFEST.loss, MANIFEST.frozen, MANIFEST.local) == ("", "", "", "")
    assert MANIFEST.feature_scale == 1


def test_it_says_which_parameters_are_frozen_and_which_stay_on_the_nodes(folder: Path) -> None:
    own = MANIFEST.model_copy(update={"frozen": "conv*", "local": "head.* norm.*"})
    write_dataset(folder, own, FEATURES, TARGETS, OFFSETS)
    assert (read_manifest(folder).frozen, read_manifest(folder).local) == ("conv*", "head.* norm.*")
