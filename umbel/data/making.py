"""What the recipes in umbel/datasets share: where they write, and who trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from umbel.data.files import check_out
from umbel.data.manifest import Manifest
from umbel.protocol.cli import errors_in_one_line
from umbel.protocol.errors import DatasetError
from umbel.protocol.home import umbel_home

Out = Annotated[Path | None, typer.Option(help="Folder to write.", show_default="$UMBEL_HOME/data/NAME")]


def command() -> typer.Typer:
    """Return the command that a recipe is."""
    return typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


def downloads() -> Path:
    """Return the folder of files that recipes have downloaded."""
    return umbel_home() / "downloads"


@contextmanager
def writing(out: Path | None, name: str) -> Iterator[Path]:
    """Yield where a recipe writes, ``$UMBEL_HOME/data/NAME`` if not to `out`; checked first, errors in one line.

    A path that ends in .json is that of a LEAF file.
    """
    folder = (out or umbel_home() / "data" / name).expanduser().absolute()
    with errors_in_one_line():
        if folder.suffix != ".json":
            check_out(folder)
        yield folder


def split_of(clients: int, percent: int, name: str, fix: str) -> dict[str, int]:
    """Return a manifest's split, in which so many of a hundred clients train; raise if there are fewer than two.

    The error's text begins with `name` and ends with `fix`.
    """
    if clients < 2:
        wrong = f"{name}, and at least 2 are needed to train and validate"
        raise DatasetError(f"{wrong}; {fix}", code="data.too-few-clients")
    # In whole numbers, where no rounding can move the border.
    train = clients * percent // 100
    return {"train": train, "validation": clients - train}


def counted(manifest: Manifest) -> str:
    """Return a manifest's split in words."""
    return f"{manifest.split['train']} training and {manifest.split['validation']} validation clients"
