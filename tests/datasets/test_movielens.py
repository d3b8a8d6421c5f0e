"""The MovieLens recipe: a few ratings, the same in every form that GroupLens gives them."""

from __future__ import annotations

import io
from http.client import IncompleteRead
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.error import URLError
from zipfile import ZipFile

import numpy as np
import pytest

from tests.datasets.conftest import Recipe, assert_same, assert_same_rows
from umbel.data import Dataset

pytestmark = pytest.mark.rest

recipe = Recipe("movielens")
movielens, run, made, assert_refused = recipe.module, recipe.run, recipe.made, recipe.assert_refused

# User, item, rating, time. User 7 rated item 50 twice, and thought better of it the second time, which is the line that
# comes first; user 9 rated one item alone, which nobody else rated.
ROWS = [
    (7, 50, 5, 300), (20, 1193, 3, 100), (3, 50, 4, 100), (7, 50, 1, 200), (20, 8, 5, 50), (9, 9000, 5, 10),
    (3, 8, 2, 70), (7, 1193, 4, 30),
]  # fmt: skip
LEAST = ["--min-ratings", "2"]

# By hand: items 8, 50, 1193 are 0, 1, 2; four stars and more are a like.
CLIENTS = {3: ([[0], [1]], [-1, 1]), 7: ([[1], [2]], [1, 1]), 20: ([[0], [2]], [1, -1])}


def text(separator: str, rows: list[tuple[Any, ...]] = ROWS, header: str = "", end: str = "\n") -> str:
    return header + "".join(separator.join(map(str, row)) + end for row in rows)


FORMS = {
    "u.data": text("\t"),
    "ratings.dat": text("::"),
    "ratings.csv": text(",", header="userId,movieId,rating,timestamp\n"),
}


def zipped(file: Path, members: dict[str, str]) -> Path:
    with ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    file = tmp_path / "u.data"
    file.write_text(FORMS["u.data"])
    return file


def assert_holds(dataset: Dataset, users: list[int]) -> None:
    """Check that the clients are those users of `CLIENTS`, in that order."""
    assert dataset.manifest.clients == len(users)
    for client, user in enumerate(users):
        features, targets = dataset.client(client)
        assert (features.tolist(), targets.tolist()) == CLIENTS[user]


@pytest.mark.parametrize("form", FORMS)
def test_a_client_is_a_user_with_items_and_likes(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever form, also in an archive, with lines as on Windows, and read in several chunks."""
    (file := tmp_path / form).write_text(FORMS[form])
    members = {"ml/README": "1,2", f"ml/{form}": FORMS[form].replace("\n", "\r\n"), "ml/u1.base": "1\t2\t3\t4\n"}
    for ratings, chunk in ((file, 1000), (zipped(tmp_path / "ml.zip", members), 1000), (file, 2)):
        monkeypatch.setattr(movielens, "_CHUNK_ROWS", chunk)
        dataset = made(tmp_path / f"out-{ratings.name}-{chunk}", "--ratings", ratings, *LEAST)
        # Seed 0 gives users 3, 7, 20 the places 2, 0, 1.
        assert np.random.default_rng(0).permutation(3).tolist() == [2, 0, 1]
        assert_holds(dataset, [7, 20, 3])
        assert dataset.manifest.split == {"train": 2, "validation": 1}
        assert (dataset.features.dtype, dataset.targets.dtype, dataset.features.shape) == (np.int32, np.int8, (6, 1))
    options = ["--seed", "3", "--factors", "5", "--name", "films", *LEAST]
    other = made(tmp_path / "other", "--ratings", file, *options)
    assert np.random.default_rng(3).permutation(3).tolist() == [2, 1, 0]
    assert_holds(other, [20, 7, 3])
    manifest = other.manifest
    assert (manifest.name, manifest.model, manifest.loss) == ("films", "factors items=3 size=5", "")
    assert manifest.units == {"items": 3}
    assert f"read from {form}" in manifest.provenance
    assert "no redistribution" in manifest.licence
    # The order of lines plays no part. A line that is no rating is named in whichever chunk it lies.
    head, rows = FORMS[form].splitlines()[:-8], FORMS[form].splitlines()[-8:]
    file.write_text("\n".join([*head, *rows[::-1]]))
    assert_same(made(tmp_path / "turned", "--ratings", file, *options), other)
    file.write_text(FORMS[form].replace("70\n", "x\n"))
    refused = run(tmp_path / "new", "--ratings", file)
    assert_refused(refused, tmp_path / "new", f"{file}, line {len(head) + 7}: the time is 'x'")


def test_what_counts_as_a_like_or_disliked_can_be_said(ratings: Path, tmp_path: Path) -> None:
    dataset = made(tmp_path / "out", "--ratings", ratings, "--liked", "3", *LEAST)
    assert dataset.targets.tolist() == [1, 1, 1, 1, -1, 1], "user 20's three stars are a like now"
    assert "latest rating is 3 or more." in dataset.manifest.provenance
    # Each user rated two of three items, so that half an item for each rated one is all that there is.
    dataset = made(tmp_path / "unrated", "--ratings", ratings, "--unrated", "0.5", *LEAST)
    for client, user in enumerate([7, 20, 3]):
        features, targets = dataset.client(client)
        assert features[:, 0].tolist() == [0, 1, 2]
        (left,) = {0, 1, 2} - {item for (item,) in CLIENTS[user][0]}
        assert targets[left] == -1
        assert np.delete(targets, left).tolist() == CLIENTS[user][1]
    assert_same_rows(made(tmp_path / "more", "--ratings", ratings, "--unrated", "9", *LEAST), dataset)


def test_a_users_last_rating_of_an_item_counts_and_users_of_few_do_not(ratings: Path, tmp_path: Path) -> None:
    ratings.write_text(text("\t", [*ROWS, (3, 1193, 1, 1), (20, 50, 1, 1)]))
    # User 7 has three ratings, of two items.
    dataset = made(tmp_path / "out", "--ratings", ratings, "--min-ratings", "3")
    assert np.diff(dataset.offsets).tolist() == [3, 3]
    # Of equal times the later line counts.
    ratings.write_text(text("\t", [(1, 1, 5, 9), (1, 1, 1, 9), (2, 1, 1, 9), (2, 1, 5, 9)]))
    dataset = made(tmp_path / "equal", "--ratings", ratings, "--min-ratings", "1", "--seed", "3")
    assert np.random.default_rng(3).permutation(2).tolist() == [1, 0]
    assert dataset.targets.tolist() == [1, -1]
    # By default ten are the least, and what others alone rated is left out.
    many = [(user, item, 3.5, 0) for user in (1, 2) for item in range(user, user + 10)]
    ratings.write_text(text("\t", [*many, *((3, item, 5, 0) for item in range(100, 109))]))
    dataset = made(tmp_path / "default", "--ratings", ratings)
    assert (dataset.manifest.clients, dataset.manifest.units) == (2, {"items": 11})
    assert set(dataset.targets.tolist()) == {-1}


def sent(ratings: Path, part: slice = slice(None)) -> io.BytesIO:
    """Return the archive that GroupLens sends, or a part of it."""
    return io.BytesIO(zipped(ratings.with_name("sent.zip"), {"ml-100k/u.data": FORMS["u.data"]}).read_bytes()[part])


def test_ml_100k_is_downloaded_once(
    ratings: Path, tmp_path: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(movielens, "urlopen", urlopen := Mock(return_value=sent(ratings)))
    given = made(tmp_path / "given", "--ratings", ratings, *LEAST)
    for _ in range(2):
        assert_same_rows(made(tmp_path / "out", *LEAST), given)
    assert [call.args for call in urlopen.call_args_list] == [
        ("https://files.grouplens.org/datasets/movielens/ml-100k.zip",)
    ]
    assert [file.name for file in (umbel_home / "downloads").iterdir()] == ["ml-100k.zip"]


@pytest.mark.parametrize("answer", [URLError("no network"), IncompleteRead(b""), slice(-9), slice(0)])
def test_a_download_that_fails_or_is_cut_short_names_the_way_around_and_keeps_nothing(
    answer: Any, ratings: Path, tmp_path: Path, umbel_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = isinstance(answer, slice)
    answers = {"return_value": sent(ratings, answer)} if cut else {"side_effect": answer}
    monkeypatch.setattr(movielens, "urlopen", Mock(**answers))
    reason = "not a complete ZIP archive" if cut else f"{movielens.URL} cannot be downloaded"
    assert_refused(run(tmp_path / "out"), tmp_path / "out", reason, "--ratings FILE")
    assert list((umbel_home / "downloads").iterdir()) == []


# --- what cannot be used

WHOLE = "not a whole number"
HEADER = "userId,movieId,rating,timestamp\n"


@pytest.mark.parametrize("form", ["u.data", "ratings.csv"])
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (("x" * 150, 8, 2, 70), f"the user is '{'x' * 40}…', {WHOLE}"),
        ((1.5, 8, 2, 70), f"the user is '1.5', {WHOLE}"),
        ((3, 10**16, 2, 70), f"the item is '10000000000000000', {WHOLE}"),
        *(((3, 8, rating, 70), f"the rating is '{rating}', not a number from 0 to 5") for rating in (5.5, "nan", '"2')),
        ((3, 8, 2), f"the time is '', {WHOLE}"),
        ((3, 8, 2, 70, 5), ""),
    ],
)
def test_a_line_that_is_no_rating_is_named(form: str, line: tuple[Any, ...], reason: str, tmp_path: Path) -> None:
    good = FORMS[form].splitlines(keepends=True)
    bad = text(movielens.SEPARATORS[form], [line])
    (file := tmp_path / form).write_text("".join([*good[:3], bad, *good[3:]]))
    reasons = [f"{file}, line 4: {reason}"] if reason else [f"{file} cannot be read: ", "line 4", "repair that line"]
    assert_refused(run(tmp_path / "out", "--ratings", file), tmp_path / "out", *reasons)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, " is not a file"),
        ("3,8,2\n", ", line 1 has 3 columns, not 4: user, item, rating, time"),
        (f"{HEADER}3,8,2\n", ", line 2 has 3 columns"),
        ("movieId,userId,rating,timestamp\n3,8,2,70\n", f", line 1: the user is 'movieId', {WHOLE}"),
        (HEADER, " holds no ratings"),
        *((content, " is not a file of ratings") for content in ("", "ratings\n", "\xff\xfe")),
        ({"ml/README": ""}, " holds 0 files named u.data, ratings.dat or ratings.csv"),
        (FORMS, " holds 3 files named u.data, ratings.dat or ratings.csv"),
        ({"ml/u.data": "1\t2\t3\t4\n1\t2\t9\t4\n"}, ", ml/u.data, line 2: the rating is '9'"),
        ({"ml/u.data": FORMS["u.data"], "": ""}, " cannot be read: Bad CRC-32"),
    ],
)
def test_a_file_of_something_else_is_named(content: Any, reason: str, ratings: Path, tmp_path: Path) -> None:
    if content is None:
        ratings.unlink()
    elif isinstance(content, str):
        ratings.write_text(content, encoding="latin-1")
    else:
        zipped(ratings, {name: text for name, text in content.items() if name})
        if "" in content:
            ratings.write_bytes(ratings.read_bytes().replace(b"1193", b"1194"))
    assert_refused(run(tmp_path / "out", "--ratings", ratings), tmp_path / "out", f"{ratings}{reason}")


@pytest.mark.parametrize(("form", "block"), [("u.data", 7), ("ratings.dat", 2**20), ("ratings.csv", 7)])
def test_a_line_that_is_too_long_is_refused_before_it_is_split_or_unpacked(
    form: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong file, as JSON of one line, would be split into as many columns as it has commas."""
    monkeypatch.setattr(movielens, "_BLOCK", block)
    out, separator, lines = tmp_path / "out", movielens.SEPARATORS[form], FORMS[form].splitlines()
    (file := tmp_path / form).write_text("\n".join([*lines, separator.join("7" * 200), *lines]))
    reason = f"{file}, line {len(lines) + 1} is longer than the 200 bytes"
    assert_refused(run(out, "--ratings", file), out, reason, "give u.data, ratings.dat or ratings.csv of MovieLens")
    archive, read = zipped(tmp_path / "ml.zip", {"ml/u.data": "1\t" * 20_000_000}), list[int]()

    class Counted(movielens._ShortLines):  # type: ignore[misc, name-defined]
        def readinto(self, buffer: Any) -> int:
            read.append(len(buffer))
            return int(super().readinto(buffer))

    monkeypatch.setattr(movielens, "_ShortLines", Counted)
    monkeypatch.setattr(movielens, "_BLOCK", 2**20)
    refused = run(out, "--ratings", archive)
    assert_refused(refused, out, f"{archive}, ml/u.data, line 1 is longer than the 200 bytes")
    assert sum(read) <= 2**20
