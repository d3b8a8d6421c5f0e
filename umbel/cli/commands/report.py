"""``umbel report``: the report of a run, written again."""

from __future__ import annotations

from typing import Annotated

import typer

from umbel.protocol.cli import errors_in_one_line
from umbel.server.runs import find_run

app = typer.Typer(add_completion=False)


@app.command()
def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run: its name, its path, or last.")] = "last",
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Another run of the same data; fedavg or local-only to make that baseline here. May be given often.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the report.html of a run, beside others: one that was interrupted, or one of a sweep, has none yet."""
    with errors_in_one_line():
        path = find_run(run)
        from umbel.research.experiments.report import write_report

        typer.echo(write_report(path, against or ()))
