"""Recipe: films that people like, one client for each user.

MovieLens (GroupLens Research, University of Minnesota): ratings from half a star to five. A user likes a film with a
rating of at least four, or --liked. Films that a user did not rate may count as disliked: --unrated. The recipe reads
the files of all releases, or downloads the smallest, ml-100k.

    python datasets/movielens.py --help
"""

from __future__ import annotations

import csv
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from io import BufferedIOBase, BufferedReader, RawIOBase
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast
from urllib.request import urlopen
from zipfile import BadZipFile, ZipFile, is_zipfile

import numpy as np
import pandas as pd
import rich.progress
import typer
from numpy.typing import NDArray
from rich.console import Console

# A script finds modules next to itself; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from umbel.data import DatasetError, Manifest, offsets_of, write_dataset
from umbel.data.making import Out, command, counted, downloads, split_of, writing

URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"

SEPARATORS = {"u.data": "\t", "ratings.dat": "::", "ratings.csv": ","}
"""The files of MovieLens that hold ratings, with the separator of their columns."""

HEADER = ["userId", "movieId", "rating", "timestamp"]
"""First line of ratings.csv; the other files have the same columns and no such line."""

LIKED = 4.0
"""The lowest rating that is a like, by default."""

LARGEST = {"user": 2**53, "item": 2**53, "rating": 5, "time": 2**53}
"""The four columns with their largest accepted numbers; beyond 2**53, a float64 cannot hold every integer."""

MOST_UNRATED = 100
"""Maximum number of unrated items for each rated one."""

_FILES = "{}, {} or {}".format(*SEPARATORS)
_GIVE = f"give {_FILES} of MovieLens with --ratings"
_CHUNK_ROWS = 200_000
_BLOCK = 2**20
_LONGEST_LINE = 200  # bytes
_LONGEST_VALUE = 40  # characters shown in an error
_TIMEOUT = 60.0

app = command()


def read_ratings(file: Path) -> pd.DataFrame:
    """Read the ratings of a MovieLens release: a file of `SEPARATORS`, under any name, or a ZIP that holds one.

    Each line becomes a row: ``user`` and ``item`` (their ids), ``rating`` (0 to 5), ``time`` (seconds).
    """
    with _opened(file) as (stream, source):
        first = stream.readline(_LONGEST_LINE).decode("utf-8", "replace").strip()
        stream.seek(0)
        separator = next((separator for separator in SEPARATORS.values() if separator in first), None)
        if separator is None:
            raise DatasetError(f"{source} is not a file of ratings; {_GIVE}", code="data.unreadable")
        header = int(first.split(separator) == HEADER)
        short = BufferedReader(_ShortLines(stream, source), _BLOCK)
        parts = [_checked(lines, source) for lines in _chunks(short, source, separator, header)]
    if not parts:
        raise DatasetError(f"{source} holds no ratings; {_GIVE}", code="data.no-rows")
    return pd.concat(parts, ignore_index=True)


def download() -> Path:
    """Download ml-100k to ``$UMBEL_HOME/downloads``, or find it there, and return the path of the archive."""
    file = downloads() / URL.rpartition("/")[2]
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as scratch:
        new = Path(scratch) / file.name
        try:
            with urlopen(URL, timeout=_TIMEOUT) as response, new.open("wb") as out:
                shutil.copyfileobj(response, out)
            # The directory of an archive is at its end, so a truncated archive has none.
            if not is_zipfile(new):
                raise OSError("the download is not a complete ZIP archive")
        except (OSError, HTTPException) as error:
            fix = "download it elsewhere and give --ratings FILE"
            raise DatasetError(f"{URL} cannot be downloaded: {error}; {fix}", code="data.download") from None
        new.replace(file)
    return file


def build(
    ratings: pd.DataFrame,
    source: str,
    name: str = "movielens",
    factors: int = 8,
    min_ratings: int = 10,
    seed: int = 0,
    liked: float = LIKED,
    unrated: float = 0.0,
) -> tuple[Manifest, NDArray[np.int32], NDArray[np.int8], NDArray[np.int64]]:
    """Turn ratings into a dataset.

    Of a user's ratings of an item, the latest counts, and among equal times the later row. Users who rated fewer than
    `min_ratings` items are left out. The others become clients in random order; the first 90 % train. Items are
    renumbered by increasing id. For each rated item, `unrated` items are drawn uniformly from those that the user did
    not rate, and count as disliked (fewer if there are not enough).

    The results are as in `umbel.data.Dataset`: a row (1,) is the item's index, and the target is 1 for a like, else -1;
    a client's rows come by increasing index. `source` is named in the manifest as what was read.
    """
    # The sort is stable: among equal times, the later row stays last.
    latest = ratings.iloc[np.argsort(ratings["time"].to_numpy(), kind="stable")]
    latest = latest.drop_duplicates(["user", "item"], keep="last")
    kept = latest[latest.groupby("user")["item"].transform("size") >= min_ratings]
    # Sorted ids, so that the result does not depend on the order of the file.
    users, user = np.unique(kept["user"], return_inverse=True)
    items, item = np.unique(kept["item"], return_inverse=True)
    enough = f"{len(users)} users rated at least {min_ratings} items"
    split = split_of(len(users), 90, enough, "lower --min-ratings, or give a file with more ratings")
    client = np.random.default_rng(seed).permutation(len(users))[user]
    likes, also = kept["rating"].to_numpy() >= liked, ""
    if unrated:
        also = f"; for each that a user rated, {unrated:g} of the others, drawn alike, count as disliked"
        owners, others = _unrated(client, item, len(items), unrated, seed)
        client, item = np.concatenate([client, owners]), np.concatenate([item, others])
        likes = np.concatenate([likes, np.full(len(others), False)])
    order = np.lexsort((item, client))
    targets = np.where(likes[order], 1, -1).astype(np.int8)
    manifest = Manifest(
        name=name,
        model=f"factors items={len(items)} size={factors}",
        clients=len(users),
        split=split,
        units={"items": len(items)},
        provenance=(
            f"MovieLens (Harper and Konstan, 2015; grouplens.org/datasets/movielens), read from {source}. One client a "
            f"user, of those with at least {min_ratings} ratings; an item is liked where its latest rating is "
            f"{liked:g} or more{also}. Made by datasets/movielens.py with seed {seed}."
        ),
        licence="MovieLens: for research; no redistribution without permission of GroupLens",
    )
    return manifest, item[order].astype(np.int32)[:, None], targets, offsets_of(np.bincount(client))


@app.command()
def main(
    ratings: Annotated[
        Path | None,
        typer.Option(
            help="u.data (ml-100k), ratings.dat (ml-1m, ml-10m), ratings.csv (ml-latest, ml-25m and later), or the "
            "ZIP archive of one; without it, ml-100k is downloaded.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the dataset.")] = "movielens",
    factors: Annotated[int, typer.Option(min=1, help="Latent factors of its model.")] = 8,
    min_ratings: Annotated[int, typer.Option(min=1, help="Users with fewer ratings are left out.")] = 10,
    liked: Annotated[float, typer.Option(min=0.5, max=5, help="The lowest rating that is a like.")] = LIKED,
    unrated: Annotated[
        float, typer.Option(min=0, max=MOST_UNRATED, help="Unrated items that count as dislikes, for each rated item.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of clients, which decides the split.")] = 0,
    out: Out = None,
) -> None:
    """Write the likes of MovieLens as a dataset, one client for each user."""
    with writing(out, name) as folder:
        if ratings is not None and not ratings.is_file():
            raise DatasetError(f"{ratings} is not a file; {_GIVE}", code="data.no-file")
        file = ratings or download()
        table = read_ratings(file)
        manifest, features, targets, offsets = build(table, file.name, name, factors, min_ratings, seed, liked, unrated)
        write_dataset(folder, manifest, features, targets, offsets)
    likes = np.add.reduceat(targets > 0, offsets[:-1], dtype=np.int64)
    typer.echo(
        f"{counted(manifest)}, {manifest.units['items']} items, {len(targets)} rows, "
        f"{likes.sum() / len(targets):.1%} of them likes"
    )
    typer.echo(f"users left out, with fewer than {min_ratings} ratings: {table['user'].nunique() - manifest.clients}")
    typer.echo(f"users who like half or more of their items: {(2 * likes >= np.diff(offsets)).sum()}")
    typer.echo(folder)


def _unrated(
    client: NDArray[np.int64], item: NDArray[np.int64], items: int, share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw for each client some of the items that it has not rated; return owner and item of each."""
    owners, others = [], []
    for one, rated in enumerate(np.split(item[np.argsort(client, kind="stable")], np.cumsum(np.bincount(client))[:-1])):
        left = np.setdiff1d(np.arange(items), rated)
        # One generator for each client: its items do not depend on the other clients.
        generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(one,)))
        drawn = generator.choice(left, min(round(share * len(rated)), len(left)), replace=False)
        owners.append(np.full(len(drawn), one))
        others.append(drawn)
    return np.concatenate(owners), np.concatenate(others)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[BinaryIO, str]]:
    """Open a file of ratings, in an archive or not, with progress; the text names it in errors."""
    try:
        if is_zipfile(file):
            with ZipFile(file) as archive:
                found = [info for info in archive.infolist() if info.filename.rpartition("/")[2] in SEPARATORS]
                if len(found) != 1:
                    wrong = f"holds {len(found)} files named {_FILES}, not one"
                    raise DatasetError(f"{file} {wrong}; unpack it and give the file", code="data.unreadable")
                source = f"{file}, {found[0].filename}"
                with archive.open(found[0]) as plain, _progress(cast(BinaryIO, plain), found[0].file_size) as stream:
                    yield stream, source
        else:
            with file.open("rb") as plain, _progress(plain, file.stat().st_size) as stream:
                yield stream, str(file)
    # zipfile raises RuntimeError for archives that it cannot unpack: a password, an unknown compression.
    except (OSError, EOFError, BadZipFile, RuntimeError, zlib.error) as error:
        fix = "remove it and download it again"
        raise DatasetError(f"{file} cannot be read: {error}; {fix}", code="data.unreadable") from None


def _progress(stream: BinaryIO, size: int) -> Any:
    return rich.progress.wrap_file(stream, size, description="Reading ratings", console=Console(stderr=True))


class _ShortLines(RawIOBase):
    """A stream of bytes that refuses a line too long for a rating, before anything splits it."""

    def __init__(self, stream: BinaryIO, source: str) -> None:
        self._stream, self._source = stream, source
        self._line, self._begun = 1, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._stream.read(len(buffer))
        lines = (self._begun + block).split(b"\n")
        if max(map(len, lines)) > _LONGEST_LINE:
            line = self._line + next(i for i, line in enumerate(lines) if len(line) > _LONGEST_LINE)
            wrong = f"is longer than the {_LONGEST_LINE} bytes that a rating may have"
            raise DatasetError(f"{self._source}, line {line} {wrong}; {_GIVE}", code="data.unreadable")
        self._line, self._begun = self._line + len(lines) - 1, lines[-1]
        buffer[: len(block)] = block
        return len(block)


def _chunks(stream: BufferedIOBase, source: str, separator: str, header: int) -> Iterator[pd.DataFrame]:
    """Read lines in parts, with all columns as text, indexed by their number in the file."""
    try:
        # Only pandas' Python engine supports separators of two letters. Its skipped lines would shift the line numbers.
        for chunk in pd.read_csv(
            stream, sep=separator, engine="c" if len(separator) == 1 else "python", header=None, skiprows=header,
            dtype=str, keep_default_na=False, quoting=csv.QUOTE_NONE, skip_blank_lines=False, chunksize=_CHUNK_ROWS,
        ):  # fmt: skip
            chunk.index += 1 + header
            # One engine fills a short line with empty texts, the other with NaN.
            yield chunk.fillna("")
    except pd.errors.EmptyDataError:
        return
    except (UnicodeDecodeError, pd.errors.ParserError) as error:
        reason = " ".join(str(error).split())
        raise DatasetError(f"{source} cannot be read: {reason}; repair that line", code="data.unreadable") from None


def _checked(lines: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return lines of text as numbers, or raise where one is not a rating."""
    if len(lines.columns) != len(LARGEST):
        wrong = f"has {len(lines.columns)} columns, not {len(LARGEST)}: {', '.join(LARGEST)}"
        raise DatasetError(f"{source}, line {lines.index[0]} {wrong}; {_GIVE}", code="data.unreadable")
    columns: dict[str, NDArray[Any]] = {}
    for column, (name, maximum) in enumerate(LARGEST.items()):
        values = pd.to_numeric(lines[column], errors="coerce").to_numpy(np.float64, na_value=np.nan)
        # Written so that NaN is not good.
        good = (values >= 0) & (values <= maximum)
        kind = "a number from 0 to 5"
        if name != "rating":
            good &= values == np.floor(values)
            kind = "a whole number"
        if len(bad := np.flatnonzero(~good)):
            value = lines[column].iloc[bad[0]]
            shown = value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}…"
            wrong = f"{source}, line {lines.index[bad[0]]}: the {name} is {shown!r}, not {kind}"
            raise DatasetError(f"{wrong}; repair or remove it", code="data.bad-value")
        columns[name] = values.astype(np.float32 if name == "rating" else np.int64)
    return pd.DataFrame(columns)


if __name__ == "__main__":
    app()
