"""Helpers that the recipes in umbel/datasets share: output folders, and the split into training and validation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from umbel.data.data import Dataset, Manifest
from umbel.data.files import check_out, write_dataset, write_leaf
from umbel.protocol.cli import errors_in_one_line
from umbel.protocol.errors import DatasetError
from umbel.protocol.home import umbel_home

Out = Annotated[Path | None, typer.Option(help="Folder to write.", show_default="$UMBEL_HOME/data/NAME")]


def command() -> typer.Typer:
    """Return the command of a recipe."""
    return typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


def downloads() -> Path:
    """Return the folder of files that recipes have downloaded."""
    return umbel_home() / "downloads"


@contextmanager
def writing(out: Path | None, name: str) -> Iterator[Path]:
    """Yield the path that a recipe writes to: `out`, or ``$UMBEL_HOME/data/NAME``. Check it first; report errors in a
    line.

    A path that ends in .json becomes a LEAF file.
    """
    folder = (out or umbel_home() / "data" / name).expanduser().absolute()
    with errors_in_one_line():
        if folder.suffix != ".json":
            check_out(folder)
        yield folder


def write(path: Path, dataset: Dataset) -> None:
    """Write a dataset to the path from `writing`, as a folder or as a LEAF file."""
    if path.suffix == ".json":
        rows = map(dataset.client, range(dataset.manifest.clients))
        write_leaf(path, dataset.manifest, dict(zip(dataset.names, rows, strict=True)))
    else:
        write_dataset(path, dataset.manifest, dataset.features, dataset.targets, dataset.offsets, dataset.names)


def split_of(clients: int, percent: int, name: str, fix: str) -> dict[str, int]:
    """Return a manifest's split in which `percent` of the clients train; raise if there are fewer than two clients.

    The error's text begins with `name` and ends with `fix`.
    """
    if clients < 2:
        wrong = f"{name}, and at least 2 are needed to train and validate"
        raise DatasetError(f"{wrong}; {fix}", code="data.too-few-clients")
    # Integer arithmetic: rounding cannot move the border.
    train = clients * percent // 100
    return {"train": train, "validation": clients - train}


def counted(manifest: Manifest) -> str:
    """Return a manifest's split in words."""
    return f"{manifest.split['train']} training and {manifest.split['validation']} validation clients"
