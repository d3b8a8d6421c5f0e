"""Recipe: handwritten digits and letters, one client for each writer, in two groups of clients.

FEMNIST (LEAF, from NIST special database 19): 62 classes, the experiment of Sec. 5.3 of the group privacy paper. All
images of a client are turned by 90 degrees counter-clockwise with probability 1/2. The recipe reads LEAF's own JSON
files, with their white paper and dark ink, or the Parquet files of flwrlabs/femnist on the Hugging Face hub. Without a
folder it downloads the Parquet files.

    python datasets/femnist.py --help
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import Progress, track

# Python does not find the modules beside a script that is loaded by path; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from writers import SIDE, About, Handwriting, Limit, Seed, check_classes, write

from umbel.data import DatasetError
from umbel.data.making import Out, command, writing

REPOSITORY = "flwrlabs/femnist"
"""The data set on the Hugging Face hub."""

COLUMNS = ("image", "writer_id", "character")
"""Columns to read from its Parquet files."""

CLASSES = 62
"""Digits, capital letters, small letters."""

LICENCE = "FEMNIST: BSD 2-Clause (LEAF), from NIST special database 19"

Leaf = Annotated[
    Path | None,
    typer.Option(help="LEAF's data folder, with train/ and test/; or a folder of its JSON.", show_default=False),
]
Parquet = Annotated[
    Path | None,
    typer.Option(
        help=f"Folder of the Parquet files of {REPOSITORY}; if neither is given, umbel downloads them.",
        show_default=False,
    ),
]
"""Options of the recipes."""

_BATCH_ROWS = 10_000
_AGAIN = "write the file again with LEAF's preprocess.sh"

app = command()


def read_leaf(folder: Path) -> Handwriting:
    """Read LEAF's JSON files, showing progress.

    The folder is the result of LEAF's preprocess.sh: one of ``*.json``, all of which are read, or one with ``train``
    and ``test`` (perhaps below ``data``), whose rows of one user are put together. A user's ``x`` are lists of 784 grey
    values in [0, 1], ``y`` the classes. If LEAF split each user's rows between the two, a user with rows in ``test``
    only has lost most of them with a missing file. Such users are left out and counted on stderr, as are users without
    images. Two files of one part may not name the same user.
    """
    rows: list[tuple[str, NDArray[np.uint8], NDArray[np.int64]]] = []
    parts: dict[Path, dict[str, Path]] = {}
    for file in track(_leaf_files(folder), "Reading LEAF", console=Console(stderr=True)):
        part = parts.setdefault(file.parent, {})
        for row in _leaf_users(file):
            if (first := part.setdefault(row[0], file)) != file:
                wrong = f"{file} and {first.name} both have user {row[0]!r}, whose rows would count twice"
                fix = "remove the copies, and keep files of train and of test in folders of these names"
                raise DatasetError(f"{wrong}; {fix}", code="data.twice")
            rows.append(row)
    if lost := _without_train([set(part) for part in parts.values()]):
        typer.echo(
            f"Writers left out, with rows only in test, because files of train are missing: {len(lost)}", err=True
        )
    kept = [row for row in rows if row[0] not in lost]
    if empty := {user for user, *_ in kept} - {user for user, _, labels in kept if len(labels)}:
        typer.echo(f"Writers left out, without images: {len(empty)}", err=True)
    if not kept:
        raise DatasetError(f"{folder}: its JSON files have no users; {_AGAIN}", code="data.no-rows")
    names, images, labels = zip(*kept, strict=True)
    writers = np.repeat(names, [len(y) for y in labels])
    return Handwriting(np.concatenate(images), np.concatenate(labels), writers)


def read_parquet(folder: Path) -> Handwriting:
    """Read the Parquet files of the Hugging Face hub, in the folder or its subfolders, showing progress."""
    files = _files(folder, "**/*.parquet", "--parquet")
    rows = [_count(file) for file in files]
    # Filled row by row: the images are large, and a second copy would not fit.
    images = np.empty((sum(rows), SIDE, SIDE), np.uint8)
    labels: list[NDArray[np.int64]] = []
    writers: list[str] = []
    start = 0
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("Decoding images", total=len(images))
        for file in files:
            first = start
            classes = []
            for batch in _batches(file):
                for image in batch.column("image").to_pylist():
                    images[start] = _decode(image, f"{file}: the image of row {start - first}")
                    start += 1
                classes.append(batch.column("character").to_numpy(zero_copy_only=False))
                writers += map(str, batch.column("writer_id").to_pylist())
                progress.update(task, completed=start)
            if classes:
                labels.append(check_classes(np.concatenate(classes), CLASSES, file))
    if not labels:
        raise DatasetError(f"{folder}: its Parquet files have no rows; give those of {REPOSITORY}", code="data.no-rows")
    return Handwriting(images, np.concatenate(labels), np.array(writers))


def download() -> Path:
    """Download the Parquet files from the Hugging Face hub, or find an earlier download."""
    try:
        # Imported only here: it is not needed if the files are at hand.
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repo_id=REPOSITORY, repo_type="dataset", allow_patterns="*.parquet"))
    except Exception as error:  # its HTTP client raises errors of many kinds
        reason = " ".join(str(error).split()).rstrip(".")
        wrong = f"{REPOSITORY} cannot be downloaded from the Hugging Face hub: {reason}"
        fix = "download its Parquet files elsewhere and give --parquet FOLDER, or give LEAF's with --leaf FOLDER"
        raise DatasetError(f"{wrong}; {fix}", code="data.download") from None


def read(leaf: Path | None, parquet: Path | None) -> tuple[Handwriting, str]:
    """Return the handwriting of LEAF's or the hub's files, downloaded if neither is given, and its provenance."""
    if leaf and parquet:
        raise DatasetError("--leaf and --parquet are both given; give one of them", code="data.options")
    found = read_leaf(leaf) if leaf else read_parquet(parquet or download())
    source = "LEAF's JSON files" if leaf else f"{REPOSITORY} of the Hugging Face hub"
    return found, f"FEMNIST (Caldas et al., LEAF), from NIST special database 19; read from {source}."


@app.command()
def main(
    leaf: Leaf = None,
    parquet: Parquet = None,
    name: Annotated[str, typer.Option(help="Name of the dataset.")] = "femnist",
    out: Out = None,
    rows: Limit = None,
    seed: Seed = 0,
) -> None:
    """Write FEMNIST as a dataset, one client for each writer. Half of the clients have images turned by 90 degrees."""
    with writing(out, name) as folder:
        found, source = read(leaf, parquet)
        about = About(recipe="femnist", name=name, model="cnn", provenance=source, licence=LICENCE)
        lines = write(folder, found, about, rows, seed)
    typer.echo("\n".join(lines))


def _files(folder: Path, pattern: str, option: str) -> list[Path]:
    """Return the files to read, sorted by name: their order on disk does not matter."""
    files = sorted(folder.glob(pattern)) if folder.is_dir() else []
    if not files:
        lack = f"has no {pattern.removeprefix('**/')}" if folder.is_dir() else "is not a folder"
        raise DatasetError(f"{folder} {lack}; give the folder of the files with {option}", code="data.no-file")
    return files


def _leaf_files(folder: Path) -> list[Path]:
    """Return the JSON files of a folder, or those of LEAF's train and test in it, which hold each row once.

    Other folders that LEAF writes beside these two, such as all_data and sampled_data, repeat the rows.
    """
    if not folder.is_dir() or any(folder.glob("*.json")):
        return _files(folder, "*.json", "--leaf")
    for place in (folder, folder / "data"):
        parts = [place / "train", place / "test"]
        if there := [part for part in parts if part.is_dir()]:
            if len(there) == 1:
                wrong = f"{place} has {there[0].name}, but LEAF's other half is missing"
                fix = f"put train and test there, or give --leaf {there[0]} for that part alone"
                raise DatasetError(f"{wrong}; {fix}", code="data.no-file")
            return [file for part in parts for file in _files(part, "*.json", "--leaf")]
    wrong = f"{folder} has neither *.json nor folders train and test with such files"
    raise DatasetError(f"{wrong}; give LEAF's data with --leaf", code="data.no-file")


def _without_train(parts: list[set[str]]) -> set[str]:
    """Return the users of LEAF's test, the second part if there are two, who lack rows in train although others have
    some.

    If no user is in both, LEAF split users and not their rows, and nothing is missing.
    """
    train, test = parts[0], set[str]().union(*parts[1:])
    return test - train if train & test else set()


def _leaf_users(file: Path) -> list[tuple[str, NDArray[np.uint8], NDArray[np.int64]]]:
    """Return name, images and labels of each user in a LEAF file.

    One file's numbers are freed before the next file is read: decoded, they take about forty times the memory of the
    bytes that are kept.
    """
    try:
        document = json.loads(file.read_bytes())
        users, data = document["users"], document["user_data"]
        if not isinstance(users, list) or not isinstance(data, dict):
            raise TypeError("users must be a list, and user_data an object")
        rows = {user: data[user] for user in users}
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        wrong = f"{file} is not LEAF JSON with users and user_data: {type(error).__name__}: {error}"
        raise DatasetError(f"{wrong}; {_AGAIN}", code="data.leaf") from None
    if len(rows) < len(users):
        twice, times = Counter(users).most_common(1)[0]
        raise DatasetError(f"{file}: users names {twice!r} {times} times; {_AGAIN}", code="data.twice")
    if unnamed := data.keys() - rows.keys():
        raise DatasetError(f"{file}: users does not name {min(unnamed)!r} of user_data; {_AGAIN}", code="data.leaf")
    return [(user, *_leaf_rows(own, f"{file}, user {user!r}")) for user, own in rows.items()]


def _leaf_rows(data: Any, source: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images and labels of one LEAF user; `source` is named in errors."""
    try:
        x, y = np.array(data["x"], np.float32), np.array(data["y"])
        # A user without rows has an empty list of each, which has no second axis.
        if x.shape != ((len(y), SIDE * SIDE) if len(y) else (0,)):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        what = f"x must be lists of {SIDE * SIDE} numbers and y as many classes"
        raise DatasetError(f"{source}: {what}; {_AGAIN}", code="data.leaf") from None
    # Written so that NaN fails.
    if not ((x >= 0) & (x <= 1)).all():
        raise DatasetError(f"{source}: grey values must be from 0 to 1; {_AGAIN}", code="data.bad-value")
    labels = check_classes(y, CLASSES, source) if len(y) else np.empty(0, np.int64)
    return np.rint(x * 255).astype(np.uint8).reshape(-1, SIDE, SIDE), labels


@contextmanager
def _opened(file: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(file) as parquet:
            yield parquet
    except (OSError, pa.ArrowException) as error:
        wrong = f"{file} cannot be read as Parquet: {error}"
        raise DatasetError(f"{wrong}; download it again", code="data.unreadable") from None


def _count(file: Path) -> int:
    """Return the number of rows in a Parquet file, without reading them."""
    with _opened(file) as parquet:
        names, rows = parquet.schema_arrow.names, int(parquet.metadata.num_rows)
    if missing := [name for name in COLUMNS if name not in names]:
        wrong = f"{file} lacks the columns {missing}; found {names}"
        raise DatasetError(f"{wrong}; give the files of {REPOSITORY}", code="data.missing-column")
    return rows


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Read a Parquet file in parts."""
    with _opened(file) as parquet:
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=list(COLUMNS)):
            if empty := [name for name in COLUMNS if batch.column(name).null_count]:
                raise DatasetError(f"{file}: rows without {', '.join(empty)}", code="data.missing-value")
            yield batch


def _decode(image: Any, source: str) -> NDArray[np.uint8]:
    """Return the grey values of a PNG as Hugging Face stores it; `source` is named in errors."""
    try:
        with Image.open(BytesIO(image["bytes"])) as picture:
            pixels = np.asarray(picture.convert("L"))
    # For a PNG with a broken part, Pillow raises SyntaxError.
    except (OSError, SyntaxError, KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{source} cannot be decoded: {error}; download the file again", code="data.shape") from None
    if pixels.shape != (SIDE, SIDE):
        wrong = f"{source} has the shape {pixels.shape}, not ({SIDE}, {SIDE})"
        raise DatasetError(f"{wrong}; give {REPOSITORY}", code="data.shape")
    return pixels


if __name__ == "__main__":
    app()
