"""What machines have of a dataset, and which simulated node lives where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.clusters import write_part
from tests.helpers.datasets import save_manifest, save_plane
from tests.helpers.errors import raises
from umbel.data import BUNDLED
from umbel.protocol.errors import ClusterError
from umbel.simulation.cluster import Machine
from umbel.simulation.places import Holding, Place, deal, look, places

WHOLE = (0, 1)


def place(name: str, part: tuple[int, int] = WHOLE, gpus: int = 0, index: int = 0) -> Place:
    return Place(Machine(name, name, 8.0, gpus), index, Holding("/data", part))


def machine(name: str, gpus: int = 0) -> Machine:
    return Machine(name, name, 8.0, gpus)


# --- what a machine has


def test_a_machine_looks_first_where_its_own_data_are(umbel_home: Path, tmp_path: Path) -> None:
    shared = save_plane(tmp_path / "shared", 4, 1)
    assert look("own", str(shared)).path == str(shared), "on a file system that machines share"
    own = write_part(shared, umbel_home / "data" / "own", 1, 2)
    found = look("own", str(shared))
    assert (found.path, found.part) == (str(own), (1, 2))
    assert look("own", str(shared)).manifest == look(str(shared), "/nowhere").manifest, "of the whole"


def test_a_dataset_that_comes_along_is_everywhere() -> None:
    assert look("synthetic", "/nowhere").path == str(BUNDLED / "synthetic.json")


def test_a_machine_without_the_data_says_so() -> None:
    found = look("nothing", "/nowhere")
    assert found.path == ""
    assert "no dataset 'nothing'" in found.missing


def test_a_machine_is_a_place_and_so_is_each_gpu(tmp_path: Path) -> None:
    own = look("own", str(save_plane(tmp_path / "own", 4, 1)))
    found = places([(machine("one"), own), (machine("two", gpus=2), own), (machine("bare"), Holding())], own, "own")
    assert [(each.machine.name, each.index, each.cpus) for each in found] == [
        ("one", 0, 8.0), ("two", 0, 4.0), ("two", 1, 4.0)
    ]  # fmt: skip


def test_machines_none_of_which_has_it_are_told() -> None:
    with raises(ClusterError, "cluster.no-data", "own", "dataset"):
        places([(machine("one"), Holding())], Holding("/own"), "own")


def test_other_data_of_that_name_are_told(tmp_path: Path) -> None:
    mine, theirs, third = (save_plane(tmp_path / name, 4, 1) for name in ("mine", "theirs", "third"))
    save_manifest(theirs, provenance="another")
    own = look("own", str(mine))
    with raises(ClusterError, "cluster.other-data", "own", "dataset"):
        places([(machine("one"), look("own", str(theirs)))], own, "own")
    (third / "targets.npy").write_bytes((third / "targets.npy").read_bytes()[:-1] + b"\x00")
    with raises(ClusterError, "cluster.other-data", "own", "dataset"):
        places([(machine("one"), look("own", str(third)))], own, "own")


def test_parts_of_other_data_are_told(tmp_path: Path) -> None:
    """What a manifest says may be the same, as of data that were made again."""
    before, after = (save_plane(tmp_path / name, 4, 1) for name in ("before", "after"))
    (after / "targets.npy").write_bytes((after / "targets.npy").read_bytes()[:-1] + b"\x00")
    parts = [look("own", str(write_part(before, tmp_path / "0", 0, 2)))]
    parts += [look("own", str(write_part(one, tmp_path / one.name / "1", 1, 2))) for one in (before, after)]
    for own in (look("own", str(before)), parts[0]):
        there = [(machine("one"), parts[0]), (machine("two"), parts[1])]
        assert len(places(there, own, "own")) == 2
        there[1] = (machine("two"), parts[2])
        with raises(ClusterError, "cluster.other-data", "own", "dataset", "1"):
            places(there, own, "own")


# --- who lives where


@pytest.mark.parametrize(
    ("there", "nodes", "homes"),
    [
        ([place("a"), place("b")], 0, "ab"),
        ([place("a"), place("b")], 5, "ababa"),
        ([place("a", (0, 2)), place("b", (1, 2))], 0, "ab"),
        ([place("a", (0, 2)), place("b", (1, 2))], 4, "abab"),
        ([place("b", (1, 2)), place("a", (0, 2)), place("c", (0, 2))], 0, "abcb"),
        ([place("a", (0, 2)), place("w")], 0, "aw"),
        ([place("a"), place("g", gpus=2), place("g", gpus=2, index=1)], 0, "gg"),
        ([place("a", (0, 2)), place("g", (1, 2), gpus=1)], 0, "ag"),
    ],
)
def test_each_simulated_node_lives_where_its_clients_are(there: list[Place], nodes: int, homes: str) -> None:
    dealt = deal(there, nodes)
    assert "".join(one.machine.name for one in dealt) == homes
    assert all(one.holds(i, len(dealt)) for i, one in enumerate(dealt))


@pytest.mark.parametrize(
    ("there", "nodes", "parts"),
    [
        ([place("a", (0, 2))], 0, ("dataset", "1", "2")),
        ([place("a", (1, 3)), place("w")], 0, ("dataset", "2", "3")),
        ([place("a", (0, 2)), place("b", (1, 3))], 0, ("dataset", "2", "3")),
        ([place("a", (0, 2)), place("b", (1, 2))], 3, ("3", "2")),
    ],
)
def test_parts_that_do_not_make_the_whole_are_told(there: list[Place], nodes: int, parts: tuple[str, ...]) -> None:
    with raises(ClusterError, "cluster.parts", *parts):
        deal(there, nodes)
