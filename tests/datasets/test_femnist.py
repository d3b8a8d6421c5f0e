"""The FEMNIST recipe: the same few images as LEAF's JSON and as the hub's Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.datasets.conftest import Recipe, assert_same_rows, image, rows_of
from umbel.data import open_dataset

pytestmark = pytest.mark.rest

recipe = Recipe("femnist")
femnist, run, made, assert_refused = recipe.module, recipe.run, recipe.made, recipe.assert_refused

# Writer and class of each row. Row r is drawn by `image`.
ROWS = [("f1", 0), ("f1", 61), ("f2", 10), ("f3", 36), ("f2", 9), ("f4", 35), ("f2", 10)]
# Two files: f2's rows lie in both, as in LEAF's train and test and in the hub's files.
PARTS = [ROWS[:4], ROWS[4:]]
# Two files of LEAF's that are of one part: each writer is in one.
WHOLE = (("f1", "f2"), ("f3", "f4"))


def png(picture: NDArray[np.uint8]) -> dict[str, Any]:
    """Encode an image as the hub stores it."""
    file = BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def write_leaf(folder: Path, names: tuple[str, str] = ("all_data_0.json", "all_data_1.json")) -> Path:
    """Write the writers of `WHOLE` as LEAF does."""
    folder.mkdir()
    for name, writers in zip(names, WHOLE, strict=True):
        write_json(folder / name, [row for row, (user, _) in enumerate(ROWS) if user in writers])
    return folder


def write_json(file: Path, rows: Iterable[int]) -> None:
    """Write some of `ROWS` as LEAF does: grey values divided by 255, users with all their rows of that file."""
    data: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        user, label = ROWS[row]
        own = data.setdefault(user, {"x": [], "y": []})
        own["x"].append((image(row).ravel() / 255).tolist())
        own["y"].append(label)
    counts = [len(own["y"]) for own in data.values()]
    file.write_text(json.dumps({"users": list(data), "num_samples": counts, "user_data": data}))


def frame(rows: list[tuple[str, int]], start: int = 0) -> pd.DataFrame:
    """Return rows as the hub's table; it has one column that is not read."""
    return pd.DataFrame(
        {
            "image": [png(image(row)) for row in range(start, start + len(rows))],
            "writer_id": [writer for writer, _ in rows],
            "hsf_id": 0,
            "character": [label for _, label in rows],
        }
    )


def write_parquet(folder: Path, names: tuple[str, str] = ("train-0.parquet", "train-1.parquet")) -> Path:
    """Write `PARTS` as the hub keeps them: a folder `data` of Parquet files."""
    (folder / "data").mkdir(parents=True)
    frame(PARTS[0]).to_parquet(folder / "data" / names[0])
    frame(PARTS[1], len(PARTS[0])).to_parquet(folder / "data" / names[1])
    return folder


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    return write_leaf(tmp_path / "leaf")


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    return write_parquet(tmp_path / "parquet")


# --- what is made


@pytest.mark.parametrize("form", ["leaf", "parquet"])
def test_a_client_is_a_writer_and_is_turned_as_a_whole(
    form: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    dataset = made(tmp_path / "out", f"--{form}", request.getfixturevalue(form), "--seed", "5")
    # Seed 5 gives the clients' places to f4, f2, f3, f1, and turns all but the second.
    generator = np.random.default_rng(5)
    assert generator.permutation(4).tolist() == [3, 1, 2, 0]
    assert generator.integers(2, size=4).tolist() == [1, 0, 1, 1]
    assert dataset.manifest.groups == [1, 0, 1, 1]
    assert rows_of(dataset, 0) == {5: (35, True)}
    assert rows_of(dataset, 1) == {2: (10, False), 4: (9, False), 6: (10, False)}
    assert rows_of(dataset, 2) == {3: (36, True)}
    assert rows_of(dataset, 3) == {0: (0, True), 1: (61, True)}
    assert dataset.manifest.split == {"train": 3, "validation": 1}


def test_the_manifest_tells_model_scale_source_and_licence(leaf: Path, parquet: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "out", "--leaf", leaf, "--seed", "5").stdout.splitlines() == [
        "3 training and 1 validation clients, 7 rows; clients whose images are turned: 3",
        str(tmp_path / "out"),
    ]
    dataset = open_dataset(tmp_path / "out")
    manifest = dataset.manifest
    assert (manifest.name, manifest.model, manifest.loss) == ("femnist", "cnn", "cross-entropy")
    assert manifest.feature_scale == 1 / 255
    assert "read from LEAF's JSON files" in manifest.provenance
    assert "NIST special database 19" in manifest.provenance
    assert "BSD 2-Clause" in manifest.licence
    assert (dataset.features.dtype, dataset.targets.dtype) == (np.uint8, np.int64)
    assert dataset.features.shape == (7, 28, 28)
    assert "read from flwrlabs/femnist" in made(tmp_path / "out", "--parquet", parquet).manifest.provenance


@pytest.mark.parametrize("options", [[], ["--rows", "2"]])
def test_order_and_form_of_the_files_play_no_part(
    leaf: Path, parquet: Path, tmp_path: Path, options: list[str]
) -> None:
    one = made(tmp_path / "out", "--leaf", leaf, *options)
    assert_same_rows(made(tmp_path / "b", "--parquet", parquet, *options), one)
    swapped = write_leaf(tmp_path / "swapped", ("b.json", "a.json"))
    assert_same_rows(made(tmp_path / "c", "--leaf", swapped, *options), one)
    swapped = write_parquet(tmp_path / "swapped-parquet", ("b.parquet", "a.parquet"))
    assert_same_rows(made(tmp_path / "d", "--parquet", swapped, *options), one)


def test_every_grey_value_survives_leafs_division(tmp_path: Path) -> None:
    greys = np.resize(np.arange(256, dtype=np.uint8), 784)
    data = {user: {"x": [(greys / 255).tolist()], "y": [0]} for user in ("a", "b")}
    (tmp_path / "all.json").write_text(json.dumps({"users": ["a", "b"], "num_samples": [1, 1], "user_data": data}))
    np.testing.assert_array_equal(femnist.read_leaf(tmp_path).images, np.stack([greys.reshape(28, 28)] * 2))


def test_a_user_without_images_is_left_out_and_told(leaf: Path, tmp_path: Path) -> None:
    empty = {"users": ["f9"], "num_samples": [0], "user_data": {"f9": {"x": [], "y": []}}}
    (leaf / "more.json").write_text(json.dumps(empty))
    assert made(tmp_path / "out", "--leaf", leaf).manifest.clients == 4
    assert "Writers left out, without images: 1\n" in run(tmp_path / "out", "--leaf", leaf).stderr
    (leaf / "more.json").unlink()
    assert "left out" not in run(tmp_path / "out", "--leaf", leaf).stderr


def test_rows_of_a_later_batch_count_and_are_named_by_their_place_in_the_file(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(tmp_path / "one", "--parquet", parquet)
    monkeypatch.setattr(femnist, "_BATCH_ROWS", 2)
    assert_same_rows(made(tmp_path / "out", "--parquet", parquet), one)
    table = frame(PARTS[1], len(PARTS[0]))
    table.at[2, "image"] = {"bytes": b"none", "path": None}
    table.to_parquet(file := parquet / "data" / "train-1.parquet")
    assert_refused(run(tmp_path / "new", "--parquet", parquet), tmp_path / "new", f"{file}: the image of row 2 cannot")


# --- LEAF's tree


def write_tree(folder: Path) -> Path:
    """Write `PARTS` as LEAF's train and test, beside all of them again: f2 alone has rows in both."""
    folder.mkdir()
    write_leaf(folder / "all_data")
    for part, rows in (("train", range(4)), ("test", range(4, 7))):
        (folder / part).mkdir()
        write_json(folder / part / f"all_data_0_niid_0_keep_0_{part}_9.json", rows)
    return folder


def test_train_and_test_are_read_once_and_a_writer_without_its_file_of_train_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "femnist").mkdir()
    tree = write_tree(tmp_path / "femnist" / "data")
    found = femnist.read_leaf(tree)
    assert {w: int((found.writers == w).sum()) for w in ("f1", "f2", "f3")} == {"f1": 2, "f2": 3, "f3": 1}
    assert sorted(found.labels[found.writers == "f2"]) == [9, 10, 10]
    result = run(tmp_path / "out", "--leaf", tree)
    assert "left out, with rows only in test, because files of train are missing: 1\n" in result.stderr, "f4"
    assert result.stdout.startswith("2 training and 1 validation clients, 6 rows")
    # The folder above data will do.
    assert_same_rows(made(tmp_path / "above", "--leaf", tmp_path / "femnist"), open_dataset(tmp_path / "out"))


def test_writers_that_were_split_as_a_whole_all_count(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "data")
    (file,) = (tree / "test").glob("*.json")
    document = json.loads(file.read_text())
    del document["user_data"]["f2"]
    file.write_text(json.dumps(document | {"users": ["f4"]}))
    assert sorted(set(femnist.read_leaf(tree).writers)) == ["f1", "f2", "f3", "f4"]


def test_a_user_in_two_files_of_one_part_is_refused(tmp_path: Path) -> None:
    """So are train and test in one folder, where nobody can tell them apart."""
    tree = write_tree(tmp_path / "data")
    write_json(copy := tree / "train" / "copy.json", [2])
    refused = run(tmp_path / "out", "--leaf", tree)
    assert_refused(refused, tmp_path / "out", f"{copy} and all_data_0_niid_0_keep_0_train_9.json both have user 'f2'")
    copy.rename(tree / "all_data" / "copy.json")
    refused = run(tmp_path / "out", "--leaf", tree / "all_data")
    assert_refused(refused, tmp_path / "out", "both have user 'f2'", "keep files of train and of test in folders")


def test_half_of_leafs_tree_is_refused(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "data")
    (tree / "test").rename(tmp_path / "elsewhere")
    result = run(tmp_path / "out", "--leaf", tree)
    assert_refused(
        result, tmp_path / "out", f"{tree} has train, but LEAF's other half is missing", f"--leaf {tree / 'train'}"
    )


# --- without a folder


def test_without_a_folder_the_hubs_parquet_files_are_downloaded(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot_download(**options: Any) -> str:
        asked.append(options)
        return str(parquet)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert_same_rows(made(tmp_path / "out"), made(tmp_path / "given", "--parquet", parquet))
    assert asked == [{"repo_id": "flwrlabs/femnist", "repo_type": "dataset", "allow_patterns": "*.parquet"}]


def test_a_download_that_fails_names_the_way_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(**_: Any) -> str:
        raise OSError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    result = run(tmp_path / "out")
    assert_refused(
        result, tmp_path / "out", "flwrlabs/femnist cannot be downloaded", ": no network;", "--parquet", "--leaf"
    )
    assert len(result.stderr.splitlines()) == 1


# --- what cannot be used


def test_both_folders_are_refused(leaf: Path, parquet: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "out", "--leaf", leaf, "--parquet", parquet)
    assert_refused(result, tmp_path / "out", "--leaf and --parquet are both given")


@pytest.mark.parametrize(
    ("option", "lack"), [("--leaf", "has neither *.json nor folders"), ("--parquet", "has no *.parquet")]
)
def test_a_folder_without_files_is_named(tmp_path: Path, option: str, lack: str) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    assert_refused(run(out, option, tmp_path / "empty"), out, f"{tmp_path / 'empty'} {lack}", option)
    assert_refused(run(out, option, tmp_path / "none"), out, f"{tmp_path / 'none'} is not a folder", option)


ROW = {"x": [[0.0] * 784], "y": [0]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", " is not LEAF JSON with users and user_data"),
        ("\xff", " is not LEAF JSON"),
        ("[]", " is not LEAF JSON"),
        ('{"users": ["a"], "user_data": {}}', " is not LEAF JSON"),
        ('{"users": "a", "user_data": {"a": {"x": [], "y": []}}}', " is not LEAF JSON"),
        (json.dumps({"users": ["a", "b", "a"], "user_data": {"a": ROW, "b": ROW}}), ": users names 'a' 2 times"),
        (json.dumps({"users": ["b"], "user_data": {"a": ROW, "b": ROW}}), ": users does not name 'a'"),
    ],
)
def test_json_that_is_not_leaf_is_named(leaf: Path, tmp_path: Path, content: str, reason: str) -> None:
    file = leaf / "all_data_1.json"
    file.write_text(content, encoding="latin-1")
    assert_refused(run(tmp_path / "out", "--leaf", leaf), tmp_path / "out", f"{file}{reason}", "preprocess.sh")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"x": [[0.0] * 783], "y": [0]}, "x must be lists of 784 numbers"),
        ({"x": [[0.0] * 784], "y": [0, 1]}, "x must be lists of 784 numbers"),
        ({"x": [[0.0] * 784]}, "x must be lists of 784 numbers"),
        ({"x": [["a"] * 784], "y": [0]}, "x must be lists of 784 numbers"),
        ({"x": [[0.0] * 392] * 2, "y": [0]}, "x must be lists of 784 numbers"),
        ({"x": [[0.0] * 783 + [10**400]], "y": [0]}, "x must be lists of 784 numbers"),
        ({"x": [[0.0] * 783 + [-0.1]], "y": [0]}, "grey values must be from 0 to 1"),
        ({"x": [[0.0] * 783 + [float("nan")]], "y": [0]}, "grey values must be from 0 to 1"),
        ({"x": [[0.0] * 784], "y": [62]}, "the label of row 0 is 62, not a class from 0 to 61"),
        ({"x": [[0.0] * 784] * 2, "y": [0, -1]}, "the label of row 1 is -1, not a class from 0 to 61"),
        ({"x": [[0.0] * 784], "y": [0.5]}, "labels must be a list of whole numbers, got float64"),
        ({"x": [[0.0] * 784], "y": ["a"]}, "labels must be a list of whole numbers, got <U1"),
        ({"x": [[0.0] * 784], "y": [[0]]}, "labels must be a list of whole numbers, got int64 of shape (1, 1)"),
    ],
)
def test_rows_of_a_user_that_cannot_be_used_are_named(
    leaf: Path, tmp_path: Path, data: dict[str, Any], reason: str
) -> None:
    file = leaf / "all_data_1.json"
    file.write_text(json.dumps({"users": ["f7"], "num_samples": [1], "user_data": {"f7": data}}))
    assert_refused(run(tmp_path / "out", "--leaf", leaf), tmp_path / "out", f"{file}, user 'f7': {reason}")


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "none.json").write_text('{"users": [], "num_samples": [], "user_data": {}}')
    assert_refused(run(out, "--leaf", tmp_path), out, f"{tmp_path}: its JSON files have no users")
    frame(PARTS[0]).iloc[:0].to_parquet(tmp_path / "none.parquet")
    assert_refused(run(out, "--parquet", tmp_path), out, f"{tmp_path}: its Parquet files have no rows")


def test_a_file_that_is_not_parquet_is_named(parquet: Path, tmp_path: Path) -> None:
    file = parquet / "data" / "train-1.parquet"
    whole = file.read_bytes()
    for content in (b"", b"version https://git-lfs.github.com/spec/v1", whole[:-9]):
        file.write_bytes(content)
        result = run(tmp_path / "out", "--parquet", parquet)
        assert_refused(result, tmp_path / "out", f"{file} cannot be read as Parquet", "download it again")


def test_missing_columns_are_named_beside_those_found(parquet: Path, tmp_path: Path) -> None:
    file = parquet / "data" / "train-1.parquet"
    frame(PARTS[1]).rename(columns={"writer_id": "writer"}).to_parquet(file)
    result = run(tmp_path / "out", "--parquet", parquet)
    assert_refused(result, tmp_path / "out", f"{file} lacks the columns ['writer_id']; found ['image', 'writer', ")


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("image", {"bytes": b"none", "path": None}, "the image of row 1 cannot be decoded"),
        ("image", {"bytes": None, "path": "a.png"}, "the image of row 1 cannot be decoded"),
        ("image", png(np.zeros((28, 32), np.uint8)), "the image of row 1 has the shape (28, 32), not (28, 28)"),
        ("image", None, "rows without image"),
        ("writer_id", None, "rows without writer_id"),
        ("character", 62, "the label of row 1 is 62, not a class from 0 to 61"),
    ],
)
def test_rows_of_a_parquet_file_that_cannot_be_used_are_named(
    parquet: Path, tmp_path: Path, column: str, value: Any, reason: str
) -> None:
    table = frame(PARTS[1])
    values = list(table[column])
    values[1] = value
    table[column] = values
    table.to_parquet(file := parquet / "data" / "train-1.parquet")
    assert_refused(run(tmp_path / "out", "--parquet", parquet), tmp_path / "out", f"{file}: {reason}")
