"""A manifest says what the data are; one that does not fit is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.datasets import FEATURES, MANIFEST, OFFSETS, TARGETS, save_manifest
from tests.helpers.errors import raises
from umbel.data import open_dataset, read_manifest, write_dataset
from umbel.protocol.errors import DatasetError


def test_groups_are_those_of_the_clients_or_unknown(folder: Path) -> None:
    assert read_manifest(folder).groups == []
    write_dataset(folder, MANIFEST.model_copy(update={"groups": [1, 0, 1]}), FEATURES, TARGETS, OFFSETS)
    assert read_manifest(folder).groups == [1, 0, 1]
    # A manifest written before there were groups.
    save_manifest(folder, groups=None)
    assert read_manifest(folder) == MANIFEST


@pytest.mark.parametrize(("target", "factor"), [({"scale": 100}, 100.0), ({"scale": -100}, 100.0), ({}, 1.0)])
def test_an_error_in_the_targets_unit_is_above_0_whatever_the_sign_of_its_scale(
    target: dict[str, Any], factor: float
) -> None:
    assert MANIFEST.model_copy(update={"units": {"target": target}}).error_scale == factor


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"modell": "cnn"}, ("data.unknown-key", "modell", "model?")),
        ({"name": None, "split": None}, ("data.missing-key", "name")),
        ({"split": {"train": 3}}, ("data.conflict", "split", "{'train': 3}")),
        ({"split": {"train": 4, "validation": -1}}, ("data.conflict", "split", "-1")),
        ({"split": {"train": 2, "validation": 1, "test": 0}}, ("data.conflict", "split", "'test'")),
        ({"split": {"train": 2.0, "validation": 1}}, ("data.wrong-value", "split.train", "2.0")),
        ({"split": {"train": 2, "validation": 2}}, ("data.conflict", "split", "3 clients")),
        ({"clients": 0, "split": {"train": 0, "validation": 0}}, ("data.wrong-value", "clients", "got 0")),
        ({"groups": [0, 1]}, ("data.conflict", "groups", "3 clients", "got 2")),
        ({"groups": [0, -1, 0]}, ("data.conflict", "groups", "-1")),
        ({"truth": [[float("inf")]]}, ("data.wrong-value", "truth.0.0", "inf")),
        ({"feature_scale": 1e300}, ("data.conflict", "feature_scale", "1e+300")),
        ({"name": "\ud800"}, ("data.conflict", "JSON")),
        ({"units": {"target": 5}}, ("data.conflict", "units", "got 5")),
        ({"units": {"target": {"categories": [1]}}}, ("data.conflict", "units.target.categories", "[1]")),
        ({"tokens": 5, "feature_scale": 0.5}, ("data.conflict", "feature_scale", "0.5")),
        ({"units": {"target": {"unit": None}}}, ("data.conflict", "units.target.unit", "None")),
        ({"units": {"target": {"scale": float("nan")}}}, ("data.conflict", "units.target.scale", "nan")),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(folder: Path, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    save_manifest(folder, **changes)
    with raises(DatasetError, *parts, f"{folder}/manifest.json"):
        open_dataset(folder)


def test_a_manifest_that_is_no_object_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")
    with raises(DatasetError, "data.manifest", f"{folder}/manifest.json"):
        open_dataset(folder)
