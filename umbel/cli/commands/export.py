"""``umbel runs export``: a run's result as files for other programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from umbel.protocol.cli import errors_in_one_line
from umbel.protocol.errors import ConfigError
from umbel.server.runs import find_run, reading

app = typer.Typer(add_completion=False)


Format = StrEnum("Format", {"SAFETENSORS": "safetensors", "ONNX": "onnx"})
"""File format of a hypothesis; see `umbel.cli.runs.export`."""


@app.command()
def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run: its name, its path, or last.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write to.")],
    format: Annotated[
        Format,
        typer.Option(
            help="File format. onnx is for data from a table: it takes raw columns and predicts in the target's unit."
        ),
    ] = Format.SAFETENSORS,
    client: Annotated[
        str,
        typer.Option(
            help="A client of the run's dataset, by its name or number: write its predictor as onnx, to client-N. No "
            "guarantee covers that file."
        ),
    ] = "",
    personalise: Annotated[
        str,
        typer.Option(help="How the client personalises the hypotheses.", show_default="as umbel predict"),
    ] = "",
) -> None:
    """Write a run's best hypotheses, one file each: hypothesis-0, hypothesis-1, ..."""
    with errors_in_one_line(), reading(run):
        if personalise and not client:
            raise ConfigError("--personalise needs --client; name one", code="config.no-client")
        path = find_run(run)
        # The import loads PyTorch; a missing run is reported before.
        from umbel.cli.runs import Run, export

        how = {"personalise": personalise} if personalise else {}
        for file in export(Run(path), folder.expanduser().absolute(), format.value, client=client or None, **how):
            typer.echo(file)
