"""``umbel predict``: clients that took no part in a run pick their best hypothesis and predict with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import safetensors
import typer

from umbel.client.prediction import mean_metric, predictions, read_features, read_run, table
from umbel.data import find_typed, open_dataset
from umbel.protocol.cli import csv_cell, errors_in_one_line
from umbel.protocol.errors import DatasetError
from umbel.protocol.home import write_atomically
from umbel.server.runs import find_run

app = typer.Typer(add_completion=False)


@app.command()
def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run: its name, its path, or last.")],
    dataset: Annotated[str, typer.Argument(help="The newcomer's labelled data: a dataset's name or path.")],
    client: Annotated[int | None, typer.Option(min=0, help="One client alone.", show_default="all")] = None,
    features: Annotated[
        Path | None, typer.Option(help="Rows without labels (.npy) to predict for.", show_default="the client's own")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write.", show_default="standard output")] = None,
) -> None:
    """Let clients that took no part in a run pick their best hypothesis and predict with it."""
    with errors_in_one_line(ValueError, safetensors.SafetensorError):
        data = open_dataset(find_typed(dataset))
        model, hypotheses = read_run(find_run(run), data)
        rows = None if features is None else read_features(features, data)
        count = data.manifest.clients
        if client is not None and client >= count:
            raise DatasetError(f"{dataset} has the clients 0 to {count - 1}, not {client}", code="data.unknown-client")
        if out is not None and not out.expanduser().absolute().parent.is_dir():
            raise DatasetError(f"{out} cannot be written: its folder is missing; make it first", code="data.no-folder")
        made = list(predictions(model, hypotheses, data, list(range(count)) if client is None else [client], rows))
    found = table(made, data, with_targets=rows is None)
    for column in found.columns.intersection(_NUMBERS):
        found[column] = found[column].map(_text)
    names = found.columns.difference(_NUMBERS)
    found[names] = found[names].map(csv_cell)
    text = found.to_csv(index=False)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_atomically(out.expanduser().absolute(), text.encode())
    mean, unit = mean_metric(made, model, data)
    shown = f"{mean:.4g} {unit}".strip()
    typer.echo(f"{len(made)} clients, mean {model.metric.name} on their labelled rows: {shown}", err=True)


_NUMBERS = ["prediction", "target"]


def _text(value: Any) -> str:
    """Return a number, or several separated by spaces."""
    return " ".join(f"{one:.6g}" if isinstance(one, float) else str(one) for one in np.atleast_1d(value).tolist())
