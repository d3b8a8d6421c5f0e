"""``umbel predict``: clients personalise a run's hypotheses with their labelled rows, and predict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from umbel.cli.commands.runs import RunName
from umbel.cli.runs import Run
from umbel.client.prediction import DEFAULT
from umbel.protocol.cli import command_line, csv_cell, errors_in_one_line, printable
from umbel.protocol.errors import DatasetError
from umbel.protocol.home import write_atomically
from umbel.protocol.words import count_of
from umbel.server.runs import find_run


@command_line
def app(
    run: RunName,
    rows: Annotated[
        str,
        typer.Argument(
            metavar="TABLE|DATASET",
            help="Rows to predict for: a CSV or parquet file, where targets may be missing, or a dataset.",
        ),
    ],
    client: Annotated[
        str, typer.Option(help="Only this client: its name, or its number if names are no numbers.", show_default="all")
    ] = "",
    personalise: Annotated[
        str,
        typer.Option(
            help="How a client personalises the hypotheses, at no cost in privacy: calibrate, mixture, bayes, "
            "fine-tune, interpolate, auto, or package.module:function. no: the best one unchanged."
        ),
    ] = DEFAULT.value,
    schema: Annotated[
        Path | None, typer.Option(help="Schema of the table.", show_default="that of the run's dataset")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write.", show_default="standard output")] = None,
) -> None:
    """Predict with a run, in the target's unit, or a class with its probability.

    A client's labelled rows choose its predictor. They come from the run's dataset if it has a client of that name,
    otherwise from the table. A client without labelled rows gets the mean of the hypotheses.
    """
    if out is not None:
        out = out.expanduser().absolute()
        # Before the work, in case its result could not be written.
        if not out.parent.is_dir():
            text = f"{out} cannot be written: its folder is missing; make it first"
            raise DatasetError(text, code="data.no-folder")
        if (out.exists() and not out.is_file()) or not os.access(out.parent, os.W_OK):
            raise DatasetError(f"{out} cannot be written; give a file in a writable folder", code="data.not-writable")
    path = find_run(run)
    with errors_in_one_line(ValueError):
        made = Run(path).predict_with_notes(rows, client or None, personalise, schema)
    found, notes = made.rows, [*made.notes, *([f"Warning: {made.warning}"] if made.warning else [])]
    numbers = [name for name in found.columns if name in ("prediction", "target") or name.startswith("probability")]
    for column in numbers:
        found[column] = found[column].map(_text, na_action="ignore")
    names = found.columns.difference([*numbers, "hypothesis"])
    found[names] = found[names].map(csv_cell)
    text = found.to_csv(index=False)
    if out is None:
        typer.echo(printable(text), nl=False)
    else:
        write_atomically(out, text.encode())
        typer.echo(f"{count_of(len(found), 'row')} predicted by {path.name}: {out}", err=True)
    for note in notes:
        typer.echo(printable(note), err=True)


def _text(value: Any) -> Any:
    """Return a number, or several separated by spaces; a text stays one that no spreadsheet reads as a formula."""
    return " ".join(
        _digits(one) if isinstance(one, float) else str(csv_cell(one)) for one in np.atleast_1d(value).tolist()
    )


def _digits(number: float) -> str:
    """Return a number with six digits, and all those before the decimal point."""
    return f"{number:.0f}" if 1e6 <= abs(number) < 1e15 else f"{number:.6g}"
