"""``umbel ranges``: a private question about the ranges of columns, and the schema that its answer makes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
import typer
from rich.table import Table
from rich.text import Text

from umbel.cli.plans import as_toml, write_text
from umbel.data import Schema, find_typed, open_dataset
from umbel.models.ranges import Answer
from umbel.privacy.accounting.guarantee import DELTA, guarantee, stated
from umbel.protocol.cli import command_line, console
from umbel.protocol.errors import ConfigError, DatasetError
from umbel.protocol.logs import printed
from umbel.protocol.release import ReleaseBy
from umbel.server.result import Result
from umbel.server.runs import find_run
from umbel.simulation.ranges import Question, with_answers
from umbel.simulation.start import dataset_of, in_this_process
from umbel.simulation.wanted import PlannedRun, Wanted


@command_line
def app(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SCHEMA|DATASET|RUN",
            help="A schema file without ranges, to plan the question for sites; a dataset, to ask its simulated "
            "clients; or the run that asked, to read its answer.",
        ),
    ],
    columns: Annotated[
        str, typer.Option(help="Columns, separated by commas.", show_default="numbers without a range or scale")
    ] = "",
    epsilon: Annotated[
        float, typer.Option(help="Price of the question for each client, between any two of its data sets.")
    ] = 0.5,
    delta: Annotated[float, typer.Option(min=0, max=0.999, help="Delta of that guarantee.")] = DELTA,
    release: Annotated[
        Literal["site", "secure"],
        typer.Option(help="The party that adds the noise: each site to its sum, or all together to one sum."),
    ] = "site",
    clients: Annotated[int, typer.Option(min=0, help="With a schema: training clients of all sites together.")] = 0,
    sites: Annotated[int, typer.Option(min=1, help="Number of sites, simulated ones with a dataset.")] = 1,
    schema: Annotated[Path | None, typer.Option(help="With a run: the schema that gets the ranges.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="schema.toml, or question.toml for sites")
    ] = None,
) -> None:
    """Ask clients for the ranges of columns, with a guarantee, and write a schema that has them."""
    by, wanted, asks_sites = ReleaseBy(release), Wanted(epsilon, delta), source.endswith(".toml")
    file = out or Path("question.toml" if asks_sites else "schema.toml")
    if file.exists():
        raise ConfigError(f"{file} exists already; give another file as --out", code="config.exists")
    if asks_sites:
        asked = Question.planned(_columns(columns, Schema.read(Path(source))), clients, wanted, by, sites)
        values = {"dataset": "", **asked.values, "delta": delta, "wait": f"nodes={sites}"}
        words = f"{_cost(asked)} {clients:,} clients are enough for {len(asked.columns)} columns."
        write_text(file, as_toml(PlannedRun(values, [words])))
        typer.echo(words)
        typer.echo(f"Next: flwr run . CONNECTION --run-config {shlex.quote(str(file))} --stream, and then")
        typer.echo(f"umbel ranges last --schema {shlex.quote(source)}")
        return
    if (name := dataset_of(source)) is None:
        result = Result(find_run(source))
    else:
        data = open_dataset(find_typed(name))
        if data.manifest.layout is None:
            raise DatasetError(f"{name} was not made from a table, and has no schema", code="data.no-schema")
        asked = Question.planned(_columns(columns, data.manifest.layout), data.manifest.train, wanted, by, sites)
        with printed(typer.echo):
            values = {"dataset": name, **asked.values, "delta": delta}
            result = Result(in_this_process(values, sites, baselines=False))
    asked = Question.of_run(result)
    layout = Schema.read(schema) if schema else result.dataset.manifest.layout if result.dataset else None
    if layout is None:
        raise ConfigError("give the schema that gets the ranges, as --schema FILE", code="config.question")
    found = asked.answers(result.parameters)
    console().print(_table(found))
    write_text(file, tomli_w.dumps(with_answers(layout, found, asked.release).entries()))
    typer.echo(f"{_cost(asked)} Later plans count it, because {file} tells of it.")
    typer.echo(file)


def _columns(columns: str, schema: Schema) -> list[str]:
    asked = [name.strip() for name in columns.split(",") if name.strip()] or schema.unranged
    if not asked:
        raise ConfigError("every number of the schema has a range or a scale; name --columns", code="config.question")
    return asked


def _cost(asked: Question) -> str:
    cost = guarantee({asked.release.release: 1}, DELTA)
    assert cost is not None, "noise with a public clip norm has a price"
    return f"The question costs each client {stated(cost)}."


def _table(found: Sequence[Answer]) -> Table:
    table = Table("column", "clients", "missing", "1 %", "median", "99 %", box=None)
    for one in found:
        ends = [f"{end:,.6g}" for end in (one.low, one.middle, one.high)]
        table.add_row(*map(Text, (one.column, f"{one.clients:,.0f}", f"{one.missing:.0%}", *ends)))
    return table
