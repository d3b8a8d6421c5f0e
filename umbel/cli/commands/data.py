"""``umbel data``: list and show datasets, and make more from recipes and tables."""

from __future__ import annotations

import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tomli_w
import typer
from pydantic import Field
from rich.table import Table
from rich.text import Text

from umbel.cli.lazy import lazy
from umbel.data import (
    BUNDLED,
    Column,
    Dataset,
    Schema,
    check_out,
    find_typed,
    open_dataset,
    read_manifest,
)
from umbel.data.find import datasets_made, load_recipe, recipes
from umbel.data.hints import Syntax
from umbel.protocol.cli import command_group, console
from umbel.protocol.errors import DatasetError
from umbel.protocol.home import umbel_home
from umbel.protocol.options import options_of

if TYPE_CHECKING:
    from umbel.data.importers.report import Report

app = command_group("List and show datasets, and make more from recipes and tables.")

_CLIENTS = 20  # to deal rows out to, where no column names clients


@dataclass(frozen=True)
class Whole:
    """Settings of an import that are of no column."""

    model: str = ""
    loss: str = ""
    seed: Annotated[int, Field(ge=0)] = 0
    alpha: Annotated[float, Field(ge=0)] = 0.0


_LAB = {"qmnist": "umbel-lab"}
"""Recipes of another package, by which a hint names it."""


def _load(name: str) -> typer.Typer:
    found: typer.Typer = load_recipe(name).app
    return found


_make = typer.Typer(
    cls=lazy(recipes, _load, _LAB),
    no_args_is_help=True,
    help="Make a dataset from public raw data by its recipe.",
)
app.add_typer(_make, name="make")


def _list() -> None:
    """Print the datasets under $UMBEL_HOME/data, and umbel's own."""
    made = datasets_made()
    names = {path.name for path in made}
    found = [*made, *(path for path in sorted(BUNDLED.glob("*.json")) if path.stem not in names)]
    table = Table("name", "training", "validation", "target", "model", "loss", box=None)
    broken = []
    for path in found:
        try:
            manifest = read_manifest(path)
        except DatasetError as error:
            broken.append(str(error))
            continue
        target = manifest.target.get("name", "")
        split = manifest.split
        name = path.name if path.is_dir() else path.stem
        cells = name, f"{split['train']:,}", f"{split['validation']:,}", target, manifest.model, manifest.loss
        table.add_row(*map(Text, cells))
    console().print(table)
    for reason in broken:
        typer.echo(f"Left out: {reason}", err=True)


@app.command()
def show(
    dataset: Annotated[
        str,
        typer.Argument(
            help="A name under $UMBEL_HOME/data or in datasets/, or a path.", show_default="a list of all datasets"
        ),
    ] = "",
    schema: Annotated[
        bool, typer.Option("--schema", help="Print only the schema, as TOML, for sites to check their tables.")
    ] = False,
) -> None:
    """Describe a dataset and its columns; without a name, list the datasets."""
    if not dataset:
        _list()
        return
    path = find_typed(dataset)
    if schema:
        layout = read_manifest(path).layout
        if layout is None:
            raise DatasetError(f"{path} was not made from a table, and has no schema", code="data.no-schema")
        typer.echo(tomli_w.dumps(layout.entries()), nl=False)
        return
    data = open_dataset(path)
    _show(data)
    typer.echo(path)


@app.command()
def check(
    table: Annotated[Path, typer.Argument(help="A CSV or parquet file.")],
    schema: Annotated[Path, typer.Option(help="The schema, a TOML or JSON file, or a manifest.json.")],
) -> None:
    """Check a site's own table against a schema, before the site goes online."""
    # The import loads pandas, which a list does not need.
    from umbel.data.table import encode, read_table

    rows = encode(read_table(table), Schema.read(schema), table)
    if not rows.clients:
        raise DatasetError(f"{table}: no rows are left; repair the table or its schema", code="data.no-rows")
    typer.echo(f"{table} fits {schema}; clients: {len(set(rows.clients)):,}, rows: {len(rows.clients):,}")
    for note in rows.notes:
        typer.echo(note)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A CSV or parquet file, one row for each sample.")],
    client: Annotated[str, typer.Option(help="The column with the client of each row.")] = "",
    target: Annotated[str, typer.Option(help="The column to predict.")] = "",
    name: Annotated[str, typer.Option(help="Name of the dataset.", show_default="the file's")] = "",
    features: Annotated[
        str, typer.Option(help="The columns to predict from, separated by commas.", show_default="all others")
    ] = "",
    drop: Annotated[
        list[str] | None, typer.Option(help="Columns to leave out, separated by commas. May be repeated.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="COLUMN.ENTRY=VALUE, as in cost.scale=10000 or ward.categories=a,b (true for those found). Entries: "
            f"{', '.join(Column.names()[1:])}. Or model, loss, seed, or alpha, with which "
            "--clients assigns classes unevenly, by Dir(alpha). May be repeated.",
        ),
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="A schema file, instead of options on columns.")] = None,
    missing: Annotated[
        str,
        typer.Option(help="At a missing value: refuse the table, drop the row, or indicate it in an extra feature."),
    ] = "refuse",
    validation: Annotated[str, typer.Option(help="Share of the clients that validate, or their names.")] = "0.2",
    test: Annotated[str, typer.Option(help="Share of the clients to keep out of all runs, or their names.")] = "0",
    clients: Annotated[int, typer.Option(help="Without --client: assign rows at random to this many clients.")] = 0,
    clip: Annotated[bool, typer.Option("--clip", help="Take numbers out of a given range to its bound.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a dataset of that name.")] = False,
) -> None:
    """Make a dataset from a table: one column holds the clients, another the target.

    Without these, it reports what each column holds, and proposes a complete command.
    """
    from umbel.data.importers import Dirichlet, Partitioner, Uniform, from_dataframe
    from umbel.data.importers.client_data import folder_of
    from umbel.data.importers.report import columns_there, look
    from umbel.data.table import read_table

    folder = folder_of(name or file.name.split(".")[0])
    columns, whole = _settings(settings or [])
    if client and clients:
        raise DatasetError("give --client COLUMN or --clients NUMBER, not both", code="data.no-client")
    if whole.alpha and not clients:
        raise DatasetError("alpha needs --clients NUMBER", code="data.alpha-without-clients")
    who: str | Partitioner | None = client or None
    if clients:
        who = Dirichlet(clients, whole.alpha, whole.seed) if whole.alpha else Uniform(clients, whole.seed)
    frame = read_table(file)
    dropped = [name for word in drop or [] for name in ([word] if word in frame.columns else _words(word))]
    columns_there(frame.columns, dropped, file)
    frame = frame.drop(columns=dropped)
    columns = {key: own for key, own in columns.items() if key not in dropped}
    entries: dict[str, Any] = {"model": whole.model, "loss": whole.loss}
    report = None
    if not schema:
        for own in columns.values():
            own |= {"outside": "clip"} if clip and {"minimum", "maximum"} & own.keys() else {}
        options: dict[str, Any] = {"missing": missing, "dealt": bool(clients)}
        options |= entries | {"provenance": f"Made from {file.name} by umbel data import."}
        chosen = [word for word in _words(features) if word not in dropped]
        names = client or None, target or None, chosen or None
        report = look(frame, *names, columns, file, Syntax.FLAGS, **options)
        _print_report(report)
        if report.guesses or report.faults:
            if flagged := _flagged(report):
                typer.echo(f"The next command leaves out {flagged}.")
            typer.echo(f"Next: {_command(report.settings)}")
        if not (client or clients or target):
            return  # a look at the table
        if not (client or clients):
            raise DatasetError("give --client COLUMN, --clients NUMBER or --schema FILE", code="data.no-client")
        if not target:
            text = f"name the column to predict, as --target {report.settings['target']!r}"
            raise DatasetError(text, code="data.no-target")
        report.check(file, Syntax.FLAGS)
    elif client or target or features or columns or missing != "refuse" or clip:
        text = "--schema replaces --client, --target, --features, --missing, --clip and entries of columns"
        raise DatasetError(f"{text}; give it, or those", code="data.schema-clash")
    if folder.exists() and not replace:
        raise DatasetError(f"{folder} exists already; give another --name, or --replace", code="data.exists")
    check_out(folder)
    data = from_dataframe(
        report.frame if report else frame,
        client=who if clients else None,
        schema=report.schema if report else schema,
        syntax=Syntax.FLAGS if report else Syntax.SCHEMA,
        validation=_share(validation),
        test=_share(test),
        seed=whole.seed,
        source=file,
        **({} if report else entries),
    )
    if whole.model or whole.loss:
        from umbel.client.trial import check_fit  # imports PyTorch, which suggested models do not need

        check_fit(data.dataset)
    data.write(folder, replace=replace)
    written = open_dataset(folder)
    known = folder.name if folder.parent == umbel_home() / "data" else str(folder)
    _show(written)
    for note in data.notes:
        typer.echo(note)
    if data.test:
        typer.echo(f"Test clients: {data.test.manifest.clients:,}, as dataset {known}/test.")
    if report and report.hint:
        typer.echo(report.hint)
    if report and "drop" in report.settings:
        typer.echo(f"Warning: imported with {_flagged(report)}. Without: {_command(report.settings)} --replace")
    typer.echo(folder)
    typer.echo(f"Next: umbel run {shlex.quote(known)}")


def _flagged(report: Report) -> str:
    """Return the columns that are better left out, with the reasons."""
    return ", ".join(f"{one.column.name} ({one.drop})" for one in report.findings if one.drop)


def _print_report(report: Report) -> None:
    """Print what each column holds and is read as, what does not fit, and what was guessed."""
    table = Table("column", "role", "type", "in the rows", "missing", "umbel proposes", box=None)
    for one in report.findings:
        entries = ", ".join(f"{key}={value}" for key, value in one.settings.items())
        lacking = "indicate" if one.lacks and one.faults else ""
        advice = "leave it out" if one.drop else entries or lacking
        lacks = f"{one.lacks:,}" if one.lacks else ""
        table.add_row(*map(Text, (one.column.name, one.role, one.column.type, one.holds, lacks, advice)))
    console().print(table)
    features = [one for one in report.findings if one.role == "feature"]
    gaps = [fault for one in features for fault in one.faults if fault.what == "missing"]
    for line in (*report.notes, *(f"To mend: {fault}." for fault in report.faults if fault not in gaps)):
        typer.echo(line)
    if places := ", ".join(f"{fault.column} (first data row {fault.row})" for fault in gaps):
        ways = "--missing indicate keeps these rows, and tells the model which they are; --missing drop leaves them out"
        typer.echo(f"To mend: some rows lack {places}. {ways}.")
    for guess in report.guesses:
        typer.echo(f"A guess: {guess}.")


def _command(settings: Mapping[str, Any]) -> str:
    """Return the command as it was typed, with the settings that a report proposes, of which the last ones count."""
    words = ["umbel", *map(shlex.quote, sys.argv[1:])]
    for key in ("client", "target", "missing"):
        if value := settings.get(key):
            words += [f"--{key}", shlex.quote(value)]
    if "client" in settings and not settings["client"]:
        words += ["--clients", str(_CLIENTS)]
    words += [f"--drop {shlex.quote(name)}" for name in settings.get("drop", [])]
    columns = settings.get("columns", {}).items()
    words += [Syntax.FLAGS.entry(name, entry, value) for name, own in columns for entry, value in own.items()]
    return " ".join(words)


def _settings(words: Sequence[str]) -> tuple[dict[str, dict[str, Any]], Whole]:
    """Return the entries of columns, and the settings of the whole dataset, in words of ``--set``."""
    columns: dict[str, dict[str, Any]] = {}
    pairs: dict[str, str] = {}
    entries, whole = Column.names()[1:], [field.name.replace("_", "-") for field in fields(Whole)]
    for word in words:
        path, equals, text = word.partition("=")
        name, dot, entry = path.rpartition(".")
        if equals and path in whole:
            pairs[path] = text
            continue
        if not (equals and dot and entry in entries):
            told = f"COLUMN.ENTRY=VALUE, with an entry of {', '.join(entries)}, or a value of {', '.join(whole)}"
            raise DatasetError(f"--set takes {told}, got {word!r}", code="data.bad-set")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:  # text, without a shell's quotes
            value = text
        listed = entry in ("categories", "na") and not isinstance(value, bool | list)
        columns.setdefault(name, {})[entry] = _words(text) if listed else value
    return columns, options_of(Whole, pairs, "--set")


def _share(text: str) -> float | list[str]:
    """Return a share of the clients, or their names, which may be numbers."""
    with suppress(ValueError):
        if 0 <= float(text) < 1:
            return float(text)
    return _words(text)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _show(data: Dataset) -> None:
    manifest, lengths = data.manifest, data.lengths
    low, middle, high = int(lengths.min()), float(np.median(lengths)), int(lengths.max())
    spread = f"{low:,}" if low == high else f"{low:,} to {high:,}, median {middle:,.10g}"
    lines: dict[str, str] = {
        "name": manifest.name,
        "clients": f"{manifest.split['train']:,} training, {manifest.split['validation']:,} validation",
        "rows": f"{len(data.targets):,}; {spread} a client",
        "features": f"{data.features.dtype} {data.features.shape[1:]}"
        + (f", tokens of a vocabulary of {manifest.tokens:,}" if manifest.tokens else ""),
        "target": _target(data),
        "model": manifest.model or "none; name one with model=...",
        "loss": manifest.loss or "the model's own",
        "provenance": manifest.provenance,
        "licence": manifest.licence,
    }
    table = Table(box=None, show_header=False)
    for key in filter(lines.get, lines):
        table.add_row(key, Text(lines[key]))
    terminal = console()
    terminal.print(table)
    if manifest.layout is not None:
        schema, table = manifest.layout, Table("column", "role", "type", "holds", "a model sees", box=None)
        roles = [*((column, "feature") for column in schema.features), (schema.target, "target")]
        for column, role in [*([(schema.client, "client")] if schema.client else []), *roles]:
            # A name or a unit may have brackets, which are no markup.
            table.add_row(*map(Text, (column.name, role, column.type, _holds(column), _seen(column, role))))
        terminal.print(table)


def _holds(column: Column) -> str:
    if column.type == "category":
        return ", ".join(column.classes)
    if column.type == "date":
        return f"dates as {column.format or '2024-01-31'}"
    limits = [f"{low:,.10g}" if low is not None else "" for low in (column.minimum, column.maximum)]
    return " ".join(filter(None, (f"{limits[0]} to {limits[1]}" if any(limits) else "", column.unit)))


def _seen(column: Column, role: str) -> str:
    if role == "client":
        return "nothing"
    if column.missing == "indicate":
        return f"{_seen(column.model_copy(update={'missing': ''}), role)}; 0 or 1, whether it is missing"
    if column.type == "boolean":
        return "-1 or 1" if role == "target" else "0 or 1"
    if column.type == "date":
        return f"numbers near 1: {', '.join(column.parts)}"
    if column.type == "category" and role == "target":
        return f"classes 0 to {len(column.classes) - 1}"
    if column.type == "category" and column.encode == "one-hot":
        return f"{len(column.classes)} numbers, 0 or 1"
    shifted = f"({column.name} - {column.offset:g})" if column.offset else column.name
    return f"{shifted} / {column.scale:g}" if (column.scale, column.offset) != (1, 0) else "unchanged"


def _target(data: Dataset) -> str:
    target = data.manifest.target
    shape = f" {data.targets.shape[1:]}" if data.targets.ndim > 1 else ""
    told = [str(target.get("name", "")), str(target.get("unit", "")), ", ".join(target.get("categories", []))]
    return "; ".join([*filter(None, told), f"{data.targets.dtype}{shape}"])
