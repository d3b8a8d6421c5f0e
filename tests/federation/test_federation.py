"""A federation is written, found and read back; what cannot be used is refused with the reason."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from federation import (
    BUNDLED,
    Federation,
    Manifest,
    find_federation,
    offsets_of,
    open_federation,
    read_manifest,
    write_federation,
    write_leaf,
)
from protocol.errors import FederationError
from protocol.home import umbel_home

# Three clients with 2, 1 and 3 rows; two of them train.
MANIFEST = Manifest(name="small", clients=3, split={"train": 2, "validation": 1})
FEATURES = np.arange(12, dtype=np.float32).reshape(6, 2)
TARGETS = np.arange(6, dtype=np.float32)
OFFSETS = np.array([0, 2, 3, 6])
LEAF = {
    "users": ["a", "b"],
    "num_samples": [1, 2],
    "user_data": {"a": {"x": [[1, 2]], "y": [0]}, "b": {"x": [[3, 4], [5, 6]], "y": [1, 0]}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The small federation on disk, alone in its parent folder."""
    path = tmp_path / "data" / "small"
    write_federation(path, MANIFEST, FEATURES, TARGETS, OFFSETS)
    return path


def save_leaf(path: Path, **changes: Any) -> Path:
    """Write `LEAF` with some keys changed."""
    path.write_text(json.dumps(LEAF | changes))
    return path


def save_manifest(folder: Path, **changes: Any) -> None:
    """Change entries of the manifest in a folder; an entry of None is taken out."""
    entries = json.loads((folder / "manifest.json").read_text()) | changes
    kept = {key: value for key, value in entries.items() if value is not None}
    (folder / "manifest.json").write_text(json.dumps(kept))


# --- offsets


def test_offsets_are_running_sums_of_lengths() -> None:
    offsets = offsets_of([2, 1, 3])
    assert offsets.tolist() == [0, 2, 3, 6]
    assert offsets.dtype == np.int64


def test_offsets_of_no_clients_hold_only_zero() -> None:
    assert offsets_of([]).tolist() == [0]


# --- round trips


@st.composite
def federations(draw: st.DrawFn, image: bool) -> Federation:
    """Ragged clients: bytes of images with classes, or numbers with numbers."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    train = draw(st.integers(0, len(lengths)))
    rows = sum(lengths)
    if image:
        features = draw(hnp.arrays(np.uint8, (rows, 2, 2)))
        targets = draw(hnp.arrays(np.int64, rows, elements=st.integers(0, 61)))
    else:
        number = st.floats(-1e6, 1e6, width=32)
        features = draw(hnp.arrays(np.float32, (rows, draw(st.integers(1, 3))), elements=number))
        shape = draw(st.sampled_from([(rows,), (rows, 2)]))
        targets = draw(hnp.arrays(np.float32, shape, elements=number))
    manifest = Manifest(
        name="drawn",
        clients=len(lengths),
        split={"train": train, "validation": len(lengths) - train},
        model=draw(st.sampled_from(["", "linear"])),
        units={"target": {"name": "payment", "unit": "dollars", "scale": 10.0}},
        truth=[[1.5, -2.0]],
        groups=draw(st.one_of(st.just([]), st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))),
        provenance=draw(st.text(max_size=5)),
    )
    return Federation(manifest, features, targets, offsets_of(lengths))


def assert_same(read: Federation, written: Federation) -> None:
    assert read.manifest == written.manifest
    np.testing.assert_array_equal(read.offsets, written.offsets)
    for i in range(written.manifest.clients):
        for ours, theirs in zip(read.client(i), written.client(i), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@given(st.booleans().flatmap(federations))
def test_folder_gives_back_what_was_written(federation: Federation) -> None:
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "drawn"
        write_federation(path, federation.manifest, federation.features, federation.targets, federation.offsets)
        read = open_federation(path)
        assert_same(read, federation)
        assert (read.features.dtype, read.targets.dtype) == (federation.features.dtype, federation.targets.dtype)
        assert read_manifest(path) == federation.manifest


@given(st.booleans().flatmap(federations))
def test_leaf_gives_back_what_was_written(federation: Federation) -> None:
    clients = {f"user-{i}": federation.client(i) for i in range(federation.manifest.clients)}
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "drawn.json"
        write_leaf(path, federation.manifest, clients)
        read = open_federation(path)
        assert_same(read, federation)
        # JSON knows no widths: features become float32, and classes stay whole numbers.
        assert read.features.dtype == np.float32
        assert read.targets.dtype == federation.targets.dtype
        assert read_manifest(path) == federation.manifest


def test_train_is_the_number_of_training_clients() -> None:
    assert MANIFEST.train == 2


def test_groups_are_those_of_the_clients_or_unknown(folder: Path) -> None:
    assert read_manifest(folder).groups == []
    write_federation(folder, replace(MANIFEST, groups=[1, 0, 1]), FEATURES, TARGETS, OFFSETS)
    assert read_manifest(folder).groups == [1, 0, 1]
    # A manifest written before there were groups.
    save_manifest(folder, groups=None)
    assert read_manifest(folder) == MANIFEST


def test_client_owns_the_rows_between_its_offsets(folder: Path) -> None:
    features, targets = open_federation(folder).client(2)
    assert features.tolist() == [[6, 7], [8, 9], [10, 11]]
    assert targets.tolist() == [3, 4, 5]


def test_folder_is_memory_mapped_and_clients_are_views(folder: Path) -> None:
    federation = open_federation(folder)
    assert isinstance(federation.features.base, np.memmap)
    assert isinstance(federation.targets.base, np.memmap)
    assert not federation.features.flags.writeable
    features, targets = federation.client(1)
    assert np.shares_memory(features, federation.features)
    assert np.shares_memory(targets, federation.targets)


def test_manifest_of_a_folder_is_read_without_its_arrays(folder: Path) -> None:
    for array in folder.glob("*.npy"):
        array.unlink()
    assert read_manifest(folder) == MANIFEST


def test_leaf_lists_users_counts_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "two.json"
    manifest = Manifest(name="two", clients=2, split={"train": 1, "validation": 1})
    write_leaf(path, manifest, {"a": ([[1.0, 2.0]], [0]), "b": (np.eye(2), np.array([1, 0]))})
    document = json.loads(path.read_text())
    assert document["users"] == ["a", "b"]
    assert document["num_samples"] == [1, 2]
    assert document["user_data"]["b"] == {"x": [[1.0, 0.0], [0.0, 1.0]], "y": [1, 0]}
    assert document["manifest"]["split"] == {"train": 1, "validation": 1}


def test_leaf_without_manifest_trains_all_users_and_takes_the_name_of_its_file(tmp_path: Path) -> None:
    federation = open_federation(save_leaf(tmp_path / "theirs.json"))
    assert federation.manifest == Manifest(name="theirs", clients=2, split={"train": 2, "validation": 0})
    assert federation.client(1)[0].tolist() == [[3, 4], [5, 6]]
    assert federation.targets.tolist() == [0, 1, 0]


def test_leaf_targets_are_numbers_if_any_clients_are(tmp_path: Path) -> None:
    data = {"a": {"x": [[1, 2]], "y": [1]}, "b": {"x": [[3, 4], [5, 6]], "y": [0.5, 2]}}
    targets = open_federation(save_leaf(tmp_path / "mixed.json", user_data=data)).targets
    assert targets.tolist() == [1, 0.5, 2]
    assert targets.dtype == np.float32


# --- writing over what is there


def test_a_federation_is_replaced(folder: Path) -> None:
    manifest = Manifest(name="next", clients=1, split={"train": 1, "validation": 0})
    write_federation(folder, manifest, FEATURES, TARGETS, np.array([0, 6]))
    assert open_federation(folder).manifest == manifest
    assert len(open_federation(folder).client(0)[0]) == 6
    assert list(folder.parent.iterdir()) == [folder], "no scratch folder stays behind"


def test_a_federation_that_fails_its_check_leaves_the_old_one(folder: Path) -> None:
    with pytest.raises(FederationError, match="features of client 0, row 1, are not finite"):
        write_federation(folder, MANIFEST, np.where(FEATURES == 3, np.nan, FEATURES), TARGETS, OFFSETS)
    np.testing.assert_array_equal(open_federation(folder).features, FEATURES)
    assert list(folder.parent.iterdir()) == [folder]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    write_federation(tmp_path, MANIFEST, FEATURES, TARGETS, OFFSETS)
    assert read_manifest(tmp_path) == MANIFEST


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FederationError, match=f"{tmp_path} exists and is not a federation; give another folder"):
        write_federation(tmp_path, MANIFEST, FEATURES, TARGETS, OFFSETS)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FederationError, match=f"{tmp_path}/thesis.tex exists and is not a federation"):
        write_federation(tmp_path / "thesis.tex", MANIFEST, FEATURES, TARGETS, OFFSETS)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_leaf_that_fails_its_check_leaves_the_old_file(tmp_path: Path) -> None:
    path = save_leaf(tmp_path / "small.json")
    manifest = Manifest(name="small", clients=1, split={"train": 1, "validation": 0})
    with pytest.raises(FederationError, match="targets of client 0, row 0, are not finite"):
        write_leaf(path, manifest, {"a": ([[1.0]], [np.inf])})
    assert json.loads(path.read_text()) == LEAF
    assert list(tmp_path.iterdir()) == [path], "no scratch file stays behind"


def test_leaf_that_does_not_fit_its_manifest_is_named_by_its_own_path(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=f"{tmp_path}/small.json: 1 users but the manifest says 3 clients"):
        write_leaf(tmp_path / "small.json", MANIFEST, {"a": ([[1.0]], [1.0])})
    assert list(tmp_path.iterdir()) == []


# --- finding


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh ``$UMBEL_HOME``."""
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_home_is_where_umbel_home_says(home: Path) -> None:
    assert umbel_home() == home


@pytest.mark.parametrize("unset", [True, False])
def test_home_is_umbel_in_the_users_home_without_umbel_home(
    unset: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if unset:
        monkeypatch.delenv("UMBEL_HOME", raising=False)
    else:
        monkeypatch.setenv("UMBEL_HOME", "")
    assert umbel_home() == tmp_path / "umbel"


def test_a_tilde_in_umbel_home_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UMBEL_HOME", "~/flowers")
    assert umbel_home() == tmp_path / "flowers"


def test_a_name_is_found_in_the_home_before_the_bundle(home: Path) -> None:
    assert find_federation("synthetic") == BUNDLED / "synthetic.json"
    mine = home / "data" / "synthetic"
    write_federation(mine, MANIFEST, FEATURES, TARGETS, OFFSETS)
    assert find_federation("synthetic") == mine


def test_the_bundled_federation_opens(home: Path) -> None:
    assert open_federation(find_federation("synthetic")).manifest.name == "synthetic"


def test_a_path_is_taken_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find_federation(str(folder)) == folder
    assert find_federation("~/small") == folder


def test_the_working_directory_plays_no_part(home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(FederationError, match="no federation 'small'"):
        find_federation("small")


def test_an_unknown_name_lists_where_it_was_looked_for(home: Path) -> None:
    with pytest.raises(FederationError) as error:
        find_federation("lilies")
    assert f"no federation 'lilies': looked for {home / 'data' / 'lilies'} and {BUNDLED / 'lilies.json'}" in str(
        error.value
    )
    assert "build it with its recipe" in str(error.value)


def test_a_path_to_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=f"looked for {tmp_path}/lilies;"):
        find_federation(f"{tmp_path}/lilies")


def test_no_name_says_how_to_give_one() -> None:
    with pytest.raises(FederationError, match='no federation given; set federation = "NAME"'):
        find_federation("")


# --- a folder that cannot be used


@pytest.mark.parametrize("name", ["features", "targets"])
def test_a_row_that_is_not_finite_is_named_with_its_file_and_client(folder: Path, name: str) -> None:
    array = np.load(folder / f"{name}.npy")
    array[3] = np.nan  # the first row of client 2
    np.save(folder / f"{name}.npy", array)
    with pytest.raises(FederationError, match=f"{folder}: {name} of client 2, row 3, are not finite; remove or repair"):
        open_federation(folder)


def test_a_bad_row_is_found_behind_the_first_part_that_is_read(tmp_path: Path) -> None:
    features = np.zeros((70_001, 1), np.float32)
    features[70_000] = np.inf
    manifest = replace(MANIFEST, clients=2, split={"train": 1, "validation": 1})
    with pytest.raises(FederationError, match="features of client 1, row 70000, are not finite"):
        write_federation(tmp_path / "long", manifest, features, np.zeros(70_001), np.array([0, 70_000, 70_001]))


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ([0, 2, 6], r"offsets must be 4 whole numbers \(clients \+ 1\), got int64 of shape \(3,\)"),
        ([0.0, 2.0, 3.0, 6.0], r"offsets must be 4 whole numbers \(clients \+ 1\), got float64 of shape \(4,\)"),
        ([1, 2, 3, 6], "offsets must run from 0 to 6 rows, got 1 to 6"),
        ([0, 2, 3, 5], "offsets must run from 0 to 6 rows, got 0 to 5"),
        ([0, 2, 2, 6], r"client 1 has no rows \(offsets 2 to 2\); leave it out"),
        ([0, 4, 3, 6], r"client 1 has no rows \(offsets 4 to 3\); leave it out"),
        # Where numbers have no sign, a difference below zero wraps to a huge one.
        (np.array([0, 4, 3, 6], np.uint64), r"client 1 has no rows \(offsets 4 to 3\); leave it out"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(
    folder: Path, offsets: list[float] | NDArray[np.uint64], reason: str
) -> None:
    np.save(folder / "offsets.npy", np.array(offsets))
    with pytest.raises(FederationError, match=f"{folder}: {reason}"):
        open_federation(folder)


@pytest.mark.parametrize(
    ("name", "array", "reason"),
    [
        ("targets", np.zeros(5), r"features \(6, 2\) and targets \(5,\) must have the same number of rows"),
        ("targets", np.float32(1), r"features \(6, 2\) and targets \(\) must have the same number of rows"),
        ("features", np.zeros((6, 2), complex), "features must be numbers, got complex128"),
        ("targets", np.array(list("abcdef")), "targets must be numbers, got <U1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(folder: Path, name: str, array: NDArray[Any], reason: str) -> None:
    np.save(folder / f"{name}.npy", array)
    with pytest.raises(FederationError, match=f"{folder}: {reason}"):
        open_federation(folder)


@pytest.mark.parametrize("name", ["features", "targets", "offsets"])
def test_a_missing_array_is_named(folder: Path, name: str) -> None:
    (folder / f"{name}.npy").unlink()
    with pytest.raises(FederationError, match=f"{folder}/{name}.npy is missing; write the federation again"):
        open_federation(folder)


@pytest.mark.parametrize("content", ["1 2 3 4 5 6", "", "PK\x03\x04 is how an .npz begins"])
def test_an_array_of_another_format_is_named(folder: Path, content: str) -> None:
    (folder / "targets.npy").write_text(content)
    with pytest.raises(FederationError, match=f"{folder}/targets.npy is not a plain .npy array"):
        open_federation(folder)


def test_pickled_objects_are_never_loaded(folder: Path) -> None:
    np.save(folder / "targets.npy", np.array([None] * 6, dtype=object), allow_pickle=True)
    with pytest.raises(FederationError, match=f"{folder}/targets.npy is not a plain .npy array"):
        open_federation(folder)


def test_a_folder_without_manifest_is_no_federation(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=f"{tmp_path}/manifest.json is missing; a federation is"):
        open_federation(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff"])
def test_a_manifest_that_is_not_json_is_named(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(FederationError, match=f"{folder}/manifest.json cannot be read as JSON"):
        open_federation(folder)


def test_a_manifest_that_is_no_object_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(FederationError, match=f"{folder}/manifest.json: the manifest must be a JSON object"):
        open_federation(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"modell": "cnn"}, r"unknown manifest entries \['modell'\]; allowed: .*'model'"),
        ({"name": None, "split": None}, r"the manifest lacks \['name', 'split'\]; write it again"),
        ({"split": {"train": 3}}, r'"split" must be {"train": a, "validation": b}, got {\'train\': 3}'),
        ({"split": [2, 1]}, r'"split" must be {"train": a, "validation": b}, got \[2, 1\]'),
        ({"clients": "3"}, r"client counts must be whole numbers, got \('3', 2, 1\)"),
        ({"split": {"train": 4, "validation": -1}}, r"client counts must be whole numbers, got \(3, 4, -1\)"),
        ({"clients": 0, "split": {"train": 0, "validation": 0}}, "the federation has no clients; build it"),
        ({"split": {"train": 2, "validation": 2}}, r"split {.*} does not add up to 3 clients"),
        ({"groups": [0, 1]}, r'"groups" must list a group for each of the 3 clients, or none, got 2'),
        ({"groups": [0, 1, 0, 1]}, r'"groups" must list a group for each of the 3 clients, or none, got 4'),
        ({"groups": "012"}, r"\"groups\" must list a group for each of the 3 clients, or none, got '012'"),
        ({"groups": [0, -1, 0]}, '"groups" must hold whole numbers from 0 on, got -1'),
        ({"groups": [0, 1, 0.5]}, r'"groups" must hold whole numbers from 0 on, got 0\.5'),
        ({"groups": [0, True, 0]}, '"groups" must hold whole numbers from 0 on, got True'),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(folder: Path, changes: dict[str, Any], reason: str) -> None:
    save_manifest(folder, **changes)
    with pytest.raises(FederationError, match=f"{folder}/manifest.json: {reason}"):
        open_federation(folder)


# --- a LEAF file that cannot be used


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=f"{tmp_path}/none.json is missing"):
        open_federation(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_samples": [1]}, "users and num_samples must be lists of one length"),
        ({"users": {"a": 0, "b": 1}}, "users and num_samples must be lists of one length"),
        ({"num_samples": 2}, "users and num_samples must be lists of one length"),
        ({"users": ["a", "a"]}, "users names a client twice"),
        (
            {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": 1, "y": [0]}}},
            "client 'a' needs rectangular lists x and y in user_data",
        ),
        (
            {"users": ["a"], "num_samples": [0], "user_data": {"a": {"x": [], "y": []}}},
            "client 'a' has no rows; leave it out",
        ),
        (
            {"user_data": LEAF["user_data"] | {"a": {"x": [[1, 2]], "y": [[0]]}}},  # type: ignore[operator]
            "clients differ in the shape of a row of y",
        ),
        ({"num_samples": [1, 3]}, "client 'b' has 2 x, 2 y and num_samples 3; make them equal"),
        ({"users": ["a", "c"]}, "client 'c' needs rectangular lists x and y in user_data"),
        (
            {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[1, 2], [3]], "y": [0, 1]}}},
            "client 'a' needs rectangular lists x and y in user_data",
        ),
        (
            {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [["1", "2"]], "y": [0]}}},
            "client 'a' holds values that are not numbers",
        ),
        (
            {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1, None]], "y": [0]}}},
            "client 'a' holds values that are not numbers",
        ),
        (
            {"user_data": LEAF["user_data"] | {"a": {"x": [[1]], "y": [0]}}},  # type: ignore[operator]
            "clients differ in the shape of a row of x",
        ),
        (
            {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1, float("nan")]], "y": [0]}}},
            "features of client 0, row 0, are not finite",
        ),
        ({"users": [], "num_samples": [], "user_data": {}}, "the federation has no clients"),
        (
            {"manifest": {"name": "three", "clients": 3, "split": {"train": 2, "validation": 1}}},
            "2 users but the manifest says 3 clients",
        ),
        (
            {"manifest": {"name": "two", "clients": 2, "split": {"train": 2, "validation": 1}}},
            "split {.*} does not add up to 2 clients",
        ),
    ],
)
def test_leaf_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = save_leaf(tmp_path / "bad.json", **changes)
    with pytest.raises(FederationError, match=f"{path}: {reason}"):
        open_federation(path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"users": [], "num_samples": []}'])
def test_json_that_is_not_leaf_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(FederationError, match=f"{path}: LEAF JSON needs the keys users, num_samples and user_data"):
        read_manifest(path)
