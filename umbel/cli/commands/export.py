"""``umbel export``: a run's hypotheses as files that other programs read, each read again before it is called done."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from umbel.protocol.cli import errors_in_one_line
from umbel.server.runs import find_run

app = typer.Typer(add_completion=False)


Format = StrEnum("Format", {"STATE_DICT": "state-dict", "SAFETENSORS": "safetensors", "ONNX": "onnx"})
"""What a hypothesis is written as; see `umbel.cli.runs.export`."""


@app.command()
def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run: its name, its path, or last.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write to.")],
    format: Annotated[Format, typer.Option(help="What each hypothesis is written as.")] = Format.SAFETENSORS,
) -> None:
    """Write a run's best hypotheses, a file each: hypothesis-0, hypothesis-1, ..."""
    with errors_in_one_line():
        path = find_run(run)
        # It takes PyTorch, which a run that is not there need not wait for.
        from umbel.cli.runs import Run, export

        for file in export(Run(path), folder.expanduser().absolute(), format.value):
            typer.echo(file)
