"""The FEMNIST recipe: the same few images as LEAF's JSON and as the hub's Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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


def png(picture: NDArray[np.uint8]) -> dict[str, Any]:
    """Encode an image as the hub stores it."""
    file = BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def write_leaf(folder: Path, names: tuple[str, str] = ("all_data_0.json", "all_data_1.json")) -> Path:
    """Write the writers as LEAF does: two files that are of one part, in each of which are all rows of two writers."""
    folder.mkdir()
    for name, writers in zip(names, (("f1", "f2"), ("f3", "f4")), strict=True):
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
    images = [png(image(row)) for row in range(start, start + len(rows))]
    writers, labels = zip(*rows, strict=True)
    return pd.DataFrame({"image": images, "writer_id": writers, "hsf_id": 0, "character": labels})


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


@pytest.mark.parametrize(("form", "source"), [("leaf", "LEAF's JSON files"), ("parquet", "flwrlabs/femnist")])
def test_a_client_is_a_writer_and_is_turned_as_a_whole(
    form: str, source: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    done = run(tmp_path / "out", f"--{form}", request.getfixturevalue(form), "--seed", "5")
    assert done.stdout.splitlines() == [
        "3 training and 1 validation clients, 7 rows; clients whose images are turned: 3",
        str(tmp_path / "out"),
    ]
    # Seed 5 gives the clients' places to f4, f2, f3, f1, and turns all but the second.
    generator = np.random.default_rng(5)
    assert generator.permutation(4).tolist() == [3, 1, 2, 0]
    assert generator.integers(2, size=4).tolist() == [1, 0, 1, 1]
    dataset = open_dataset(tmp_path / "out")
    assert [rows_of(dataset, client) for client in range(4)] == [
        {5: (35, True)}, {2: (10, False), 4: (9, False), 6: (10, False)}, {3: (36, True)},
        {0: (0, True), 1: (61, True)},
    ]  # fmt: skip
    manifest = dataset.manifest
    assert (manifest.groups, manifest.split) == ([1, 0, 1, 1], {"train": 3, "validation": 1})
    assert (manifest.name, manifest.model, manifest.loss) == ("femnist", "cnn", "cross-entropy")
    assert manifest.feature_scale == 1 / 255
    assert f"read from {source}" in manifest.provenance
    assert "BSD 2-Clause" in manifest.licence
    assert (dataset.features.dtype, dataset.targets.dtype) == (np.uint8, np.int64)


@pytest.mark.parametrize("options", [[], ["--rows", "2"]])
def test_order_and_form_of_files_play_no_part(leaf: Path, parquet: Path, tmp_path: Path, options: list[str]) -> None:
    one = made(tmp_path / "out", "--leaf", leaf, *options)
    assert_same_rows(made(tmp_path / "b", "--parquet", parquet, *options), one)
    swapped = write_leaf(tmp_path / "swapped", ("b.json", "a.json"))
    assert_same_rows(made(tmp_path / "c", "--leaf", swapped, *options), one)
    swapped = write_parquet(tmp_path / "swapped-parquet", ("b.parquet", "a.parquet"))
    assert_same_rows(made(tmp_path / "d", "--parquet", swapped, *options), one)


def test_every_grey_value_survives_leafs_division_and_a_user_without_images_is_left_out(tmp_path: Path) -> None:
    greys = np.resize(np.arange(256, dtype=np.uint8), 784)
    data: dict[str, Any] = {user: {"x": [(greys / 255).tolist()], "y": [0]} for user in ("a", "b")}
    data["f9"] = {"x": [], "y": []}
    folder = tmp_path / "leaf"
    folder.mkdir()
    (folder / "all.json").write_text(json.dumps({"users": [*data], "num_samples": [1, 1, 0], "user_data": data}))
    np.testing.assert_array_equal(femnist.read_leaf(folder).images, np.stack([greys.reshape(28, 28)] * 2))
    assert "Writers left out, without images: 1\n" in run(tmp_path / "out", "--leaf", folder).stderr


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
    assert "f4" not in found.writers
    result = run(tmp_path / "out", "--leaf", tree)
    assert "left out, with rows only in test, because files of train are missing: 1\n" in result.stderr, "f4"
    assert result.stdout.startswith("2 training and 1 validation clients, 6 rows")
    # The folder above data will do.
    assert_same_rows(made(tmp_path / "above", "--leaf", tmp_path / "femnist"), open_dataset(tmp_path / "out"))


def test_of_leafs_tree_writers_split_as_a_whole_count_and_what_cannot_be_told_apart_is_refused(tmp_path: Path) -> None:
    tree, out = write_tree(tmp_path / "data"), tmp_path / "out"
    (file,) = (tree / "test").glob("*.json")
    document = json.loads(file.read_text())
    del document["user_data"]["f2"]
    file.write_text(json.dumps(document | {"users": ["f4"]}))
    assert sorted(set(femnist.read_leaf(tree).writers)) == ["f1", "f2", "f3", "f4"]
    # A user in two files of one part; so are train and test in one folder.
    write_json(copy := tree / "train" / "copy.json", [2])
    name = "all_data_0_niid_0_keep_0_train_9.json"
    assert_refused(run(out, "--leaf", tree), out, f"{copy} and {name} both have user 'f2'")
    copy.rename(tree / "all_data" / "copy.json")
    refused = run(out, "--leaf", tree / "all_data")
    assert_refused(refused, out, "both have user 'f2'", "keep files of train and of test in folders")
    (tree / "test").rename(tmp_path / "elsewhere")
    refused = run(out, "--leaf", tree)
    assert_refused(refused, out, f"{tree} has train, but LEAF's other half is missing", f"--leaf {tree / 'train'}")


def test_without_a_folder_the_hubs_are_downloaded(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda **options: asked.append(options) or str(parquet))
    assert_same_rows(made(tmp_path / "out"), made(tmp_path / "given", "--parquet", parquet))
    assert asked == [{"repo_id": "flwrlabs/femnist", "repo_type": "dataset", "allow_patterns": "*.parquet"}]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=OSError("no\nnetwork")))
    result = run(new := tmp_path / "new")
    assert_refused(result, new, "flwrlabs/femnist cannot be downloaded", ": no network;", "--parquet", "--leaf")
    assert len(result.stderr.splitlines()) == 1


# --- what cannot be used


def test_folders_that_cannot_be_used_are_named(leaf: Path, parquet: Path, tmp_path: Path) -> None:
    out, empty = tmp_path / "out", tmp_path / "empty"
    empty.mkdir()
    assert_refused(run(out, "--leaf", leaf, "--parquet", parquet), out, "--leaf and --parquet are both given")
    for option, lack in (("--leaf", "has neither *.json nor folders"), ("--parquet", "has no *.parquet")):
        assert_refused(run(out, option, empty), out, f"{empty} {lack}", option)
        assert_refused(run(out, option, tmp_path / "none"), out, f"{tmp_path / 'none'} is not a folder", option)
    (empty / "none.json").write_text('{"users": [], "num_samples": [], "user_data": {}}')
    assert_refused(run(out, "--leaf", empty), out, f"{empty}: its JSON files have no users")
    frame(PARTS[0]).iloc[:0].to_parquet(empty / "none.parquet")
    assert_refused(run(out, "--parquet", empty), out, f"{empty}: its Parquet files have no rows")


ROW = {"x": [[0.0] * 784], "y": [0]}
X, GREY, LABELS = "x must be lists of 784 numbers", "grey values must be from 0 to 1", "labels must be a list of whole "


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *((text, " is not LEAF JSON") for text in (
            "{", "\xff", "[]", '{"users": ["a"], "user_data": {}}',
            '{"users": "a", "user_data": {"a": {"x": [], "y": []}}}',
        )),
        (json.dumps({"users": ["a", "b", "a"], "user_data": {"a": ROW, "b": ROW}}), ": users names 'a' 2 times"),
        (json.dumps({"users": ["b"], "user_data": {"a": ROW, "b": ROW}}), ": users does not name 'a'"),
        *((ROW | {"x": rows}, X) for rows in (
            [[0.0] * 783], [["a"] * 784], [[0.0] * 392] * 2, [[0.0] * 783 + [10**400]],
        )),
        *((ROW | {"x": [[0.0] * 783 + [value]]}, GREY) for value in (-0.1, float("nan"))),
        (ROW | {"y": [62]}, "the label of row 0 is 62, not a class from 0 to 61"),
        (ROW | {"y": ["a"]}, f"{LABELS}numbers, got <U1"),
        (ROW | {"y": [[0]]}, f"{LABELS}numbers, got int64 of shape (1, 1)"),
    ],
)  # fmt: skip
def test_json_of_no_use_is_named(leaf: Path, tmp_path: Path, content: str | dict[str, Any], reason: str) -> None:
    file = leaf / "all_data_1.json"
    if isinstance(content, dict):
        content, reason = json.dumps({"users": ["f7"], "user_data": {"f7": content}}), f", user 'f7': {reason}"
    file.write_text(content, encoding="latin-1")
    assert_refused(run(tmp_path / "out", "--leaf", leaf), tmp_path / "out", f"{file}{reason}")


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("image", {"bytes": b"none", "path": None}, ": the image of row 1 cannot be decoded"),
        ("image", png(np.zeros((28, 32), np.uint8)), ": the image of row 1 has the shape (28, 32), not (28, 28)"),
        ("image", None, ": rows without image"),
        ("character", 62, ": the label of row 1 is 62, not a class from 0 to 61"),
        ("", "writer_id", " lacks the columns ['writer_id']; found ['image', 'writer', "),
        ("", b"", " cannot be read as Parquet"),
        ("", slice(-9), " cannot be read as Parquet"),
    ],
)
def test_a_parquet_file_of_no_use_is_named(parquet: Path, tmp_path: Path, column: str, value: Any, reason: str) -> None:
    table, file = frame(PARTS[1]), parquet / "data" / "train-1.parquet"
    if column:
        values = list(table[column])
        values[1] = value
        table[column] = values
        table.to_parquet(file)
    elif isinstance(value, str):
        table.rename(columns={value: "writer"}).to_parquet(file)
    else:
        file.write_bytes(file.read_bytes()[value] if isinstance(value, slice) else value)
    assert_refused(run(tmp_path / "out", "--parquet", parquet), tmp_path / "out", f"{file}{reason}")
