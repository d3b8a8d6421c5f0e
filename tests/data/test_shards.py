"""A dataset in parts: what each holds, and that who needs the whole is told when there is a part alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.datasets import save_manifest, save_plane
from tests.helpers.errors import raises
from umbel.data import Dataset, open_dataset, shard, write_dataset
from umbel.protocol.errors import DatasetError


@pytest.fixture
def whole(tmp_path: Path) -> Dataset:
    """Five training clients and two that validate; client i has i + 1 rows."""
    return open_dataset(save_plane(tmp_path / "whole", 5, 2, groups=[0, 1, 0, 1, 0, 1, 0]))


def written(part: Dataset, folder: Path) -> Path:
    write_dataset(folder, part.manifest, part.features, part.targets, part.offsets, part.names)
    return folder


def test_a_part_keeps_the_numbers_and_the_manifest_of_the_whole(whole: Dataset, tmp_path: Path) -> None:
    part = open_dataset(written(shard(whole, 1, 3), tmp_path / "part"), part=True)
    assert part.manifest == whole.manifest.model_copy(update={"part": "1/3", "whole": whole.digest})
    for client in range(7):
        for mine, all_ in zip(part.client(client), whole.client(client), strict=True):
            np.testing.assert_array_equal(mine, all_ if client % 3 == 1 else all_[:0])
    np.testing.assert_array_equal(part.lengths, [2, 5])
    np.testing.assert_array_equal(whole.lengths, range(1, 8))


def test_parts_of_other_rows_say_so(whole: Dataset) -> None:
    same = Dataset(whole.manifest, np.array(whole.features), whole.targets, whole.offsets, list("abcdefg"))
    assert shard(same, 0, 3).manifest == shard(whole, 0, 3).manifest
    assert shard(whole, 0, 3).manifest.whole == shard(whole, 1, 3).manifest.whole
    targets = np.array(whole.targets)
    targets[-1] += 1  # of the last client, which is in part 0
    others = Dataset(whole.manifest, whole.features, targets, whole.offsets)
    moved = Dataset(whole.manifest, whole.features, whole.targets, whole.offsets + (np.arange(8) == 1))
    assert len({shard(one, 1, 3).manifest.whole for one in (whole, others, moved)}) == 3


def test_names_stay_where_their_clients_are(whole: Dataset) -> None:
    named = Dataset(whole.manifest, whole.features, whole.targets, whole.offsets, list("abcdefg"))
    assert list(shard(named, 0, 3).names) == ["a", "", "", "d", "", "", "g"]


@pytest.mark.parametrize(
    ("first", "step", "held"),
    [(1, 3, True), (4, 6, True), (1, 6, True), (0, 3, False), (2, 6, False), (1, 2, False), (0, 1, False)],
)
def test_a_node_can_host_what_a_part_holds_or_a_share_of_it(whole: Dataset, first: int, step: int, held: bool) -> None:
    assert shard(whole, 1, 3).holds(first, step) is held
    assert whole.holds(first, step)


@pytest.mark.parametrize(("first", "step"), [(0, 6), (0, 0), (3, 3), (-1, 3)])
def test_a_part_that_cannot_be_is_refused(whole: Dataset, first: int, step: int) -> None:
    """There are no more parts than training clients; they are numbered from 0; none is sharded again."""
    with raises(DatasetError, "data.part"):
        shard(whole, first, step)
    with raises(DatasetError, "data.part", "part 0/2"):
        shard(shard(whole, 0, 2), 0, 2)
    assert shard(whole, 0, 1).manifest == whole.manifest


def test_who_needs_the_whole_is_told(whole: Dataset, tmp_path: Path) -> None:
    path = written(shard(whole, 0, 2), tmp_path / "part")
    with raises(DatasetError, "data.part", "part 0/2"):
        open_dataset(path)


@pytest.mark.parametrize("part", ["2/2", "-1/2", "0/0", "1", "01/2"])
def test_a_manifest_names_a_part_that_there_is(part: str, whole: Dataset, tmp_path: Path) -> None:
    path = written(whole, tmp_path / "part")
    save_manifest(path, part=part)
    with raises(DatasetError, "data.conflict", "part", "i/m"):
        open_dataset(path, part=True)


def test_the_rows_are_those_of_the_part_that_is_named(whole: Dataset, tmp_path: Path) -> None:
    path = written(shard(whole, 0, 2), tmp_path / "part")
    save_manifest(path, part="1/2")
    with raises(DatasetError, "data.empty-client", "client 1"):
        open_dataset(path, part=True)
    path = written(whole, tmp_path / "all")
    save_manifest(path, part="0/2")
    with raises(DatasetError, "data.part", "client 1", "part 0/2"):
        open_dataset(path, part=True)


def test_a_manifest_of_the_whole_does_not_speak_of_parts(whole: Dataset, tmp_path: Path) -> None:
    assert not {"part", "whole"} & set(json.loads((written(whole, tmp_path / "all") / "manifest.json").read_text()))
