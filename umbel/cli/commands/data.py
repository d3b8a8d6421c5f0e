"""``umbel data``: what datasets there are, what is in them, and how more are made: by recipes and from tables."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tomli_w
import typer
from rich.table import Table

from umbel.cli.lazy import lazy
from umbel.data import BUNDLED, Column, Dataset, Schema, find_typed, open_dataset, read_manifest, shard, write_dataset
from umbel.data.find import load_recipe, recipes
from umbel.data.split import main as split
from umbel.protocol.cli import command_group, console, errors_in_one_line
from umbel.protocol.errors import DatasetError
from umbel.protocol.home import umbel_home
from umbel.protocol.run_config import RunConfig

app = command_group("The datasets on this machine; recipes and tables that make more.")

_LARGE = 10.0  # a number of which a local step of the usual size makes too much


def _load(name: str) -> typer.Typer:
    found: typer.Typer = load_recipe(name).app
    return found


_make = typer.Typer(
    cls=lazy(recipes, _load, "recipes"), no_args_is_help=True, help="Make a dataset of public raw data by its recipe."
)
app.add_typer(_make, name="make")
app.command("split")(split)


@app.command("list")
def list_() -> None:
    """List the datasets under $UMBEL_HOME/data, and those that come with umbel."""
    with errors_in_one_line():
        home = umbel_home() / "data"
    made = sorted(path.parent for path in home.glob("*/manifest.json")) if home.is_dir() else []
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
        target = manifest.units.get("target", {}).get("name", "")
        split = manifest.split
        name = path.name if path.is_dir() else path.stem
        table.add_row(name, f"{split['train']:,}", f"{split['validation']:,}", target, manifest.model, manifest.loss)
    console().print(table)
    for reason in broken:
        typer.echo(f"Left out: {reason}", err=True)


@app.command()
def describe(
    dataset: Annotated[str, typer.Argument(help="A name under $UMBEL_HOME/data or in datasets/, or a path.")],
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the schema alone, as TOML, for sites to check their tables against.")
    ] = False,
) -> None:
    """Show what a dataset says of itself, and its columns."""
    with errors_in_one_line():
        path = find_typed(dataset)
        if schema:
            layout = read_manifest(path).layout
            if layout is None:
                raise DatasetError(f"{path} was not made from a table, and has no schema", code="data.no-schema")
            typer.echo(tomli_w.dumps(layout.entries()), nl=False)
            return
        data = open_dataset(path, part=True)
    _show(data)
    typer.echo(path)


@app.command()
def check(
    table: Annotated[Path, typer.Argument(help="A CSV or parquet file.")],
    schema: Annotated[Path, typer.Option(help="The schema, a TOML or JSON file, or a manifest.json.")],
) -> None:
    """Check a site's own table against a schema, before the site goes online."""
    # Imports pandas, which a list does without.
    from umbel.data.table import encode, read_table

    with errors_in_one_line():
        rows = encode(read_table(table), Schema.read(schema), table)
        if not rows.clients:
            raise DatasetError(f"{table}: no row is left; repair the table or its schema", code="data.no-rows")
    typer.echo(f"{table} fits {schema}; clients: {len(set(rows.clients)):,}, rows: {len(rows.clients):,}")
    for reason, count in rows.left_out.items():
        typer.echo(f"Rows left out: {count:,}, because {reason}.")


@app.command("shard")
def shard_(
    dataset: Annotated[str, typer.Argument(help="A name under $UMBEL_HOME/data or in datasets/, or a path.")],
    parts: Annotated[int, typer.Argument(min=1, help="How many.")],
    out: Annotated[
        Path | None, typer.Option(help="Where part-0, part-1, ... are written.", show_default="NAME-shards")
    ] = None,
    only: Annotated[int | None, typer.Option(min=0, help="Write this part alone.", show_default="all")] = None,
) -> None:
    """Split a dataset into parts for the machines of a Ray cluster: what is learnt stays the same."""
    with errors_in_one_line():
        path = find_typed(dataset)
        name = path.name if path.is_dir() else path.stem
        whole, folder = open_dataset(path), out or Path(f"{name}-shards")
        for i in range(parts) if only is None else [only]:
            part = shard(whole, i, parts)
            target = folder / f"part-{i}" / "data" / name
            write_dataset(target, part.manifest, part.features, part.targets, part.offsets, part.names)
            typer.echo(f"{target}: the rows of {len(part.lengths):,} clients")
    typer.echo("Next: copy each part to one machine, as its $UMBEL_HOME.")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A CSV or parquet file, a row a sample.")],
    client: Annotated[str, typer.Option(help="The column that says whose each row is.")] = "",
    target: Annotated[str, typer.Option(help="The column that is predicted.")] = "",
    name: Annotated[str, typer.Option(help="Name of the dataset.", show_default="the file's")] = "",
    features: Annotated[
        str, typer.Option(help="The columns that it is predicted from, separated by commas.", show_default="all others")
    ] = "",
    drop: Annotated[str, typer.Option(help="Columns to leave out, separated by commas.")] = "",
    categories: Annotated[
        list[str] | None,
        typer.Option(help="COLUMN, to take what it holds as categories, or COLUMN=a,b,c; may be repeated."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help=f"COLUMN.ENTRY=VALUE, as cost.scale=10000; entries are {', '.join(Column.names()[1:])}."
        ),
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="A schema, in place of all that.")] = None,
    missing: Annotated[str, typer.Option(help="What becomes of a row without a value: refuse or drop.")] = "refuse",
    standardise: Annotated[
        bool, typer.Option("--standardise", help="Scale numbers by statistics of these rows; for simulation alone.")
    ] = False,
    validation: Annotated[str, typer.Option(help="Share of the clients that validate, or their names.")] = "0.2",
    test: Annotated[str, typer.Option(help="Share of the clients that take part in no run, or their names.")] = "0",
    clients: Annotated[int, typer.Option(help="Without --client: deal the rows to so many clients at random.")] = 0,
    alpha: Annotated[
        float, typer.Option(help="With --clients: deal classes unevenly, by Dir(alpha); 0 for evenly.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split, and of --clients.")] = 0,
    model: Annotated[str, typer.Option(help="The model it is for.", show_default="linear")] = "",
    loss: Annotated[str, typer.Option(help="The loss.", show_default="what suits the target")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace a dataset of that name.")] = False,
) -> None:
    """Make a dataset of a table: a column says whose each row is, another what is predicted."""
    from umbel.data.importers import Dirichlet, Partitioner, Uniform, from_dataframe
    from umbel.data.importers.client_data import folder_of
    from umbel.data.table import read_table

    with errors_in_one_line():
        if not file.is_file():
            raise DatasetError(f"{file} is not a file; give a CSV or parquet file", code="data.no-file")
        folder = folder_of(name or file.name.split(".")[0])
        if folder.exists() and not replace:
            raise DatasetError(f"{folder} is there already; give another --name, or --replace", code="data.exists")
        if schema and (client or target or features or drop or categories or settings or missing != "refuse"):
            raise DatasetError("give --schema FILE or options on columns, not both", code="data.schema-and-options")
        if not schema and bool(client) == bool(clients):
            raise DatasetError("give --client COLUMN, --clients NUMBER or --schema FILE", code="data.no-client")
        if alpha and not clients:
            raise DatasetError("--alpha takes --clients NUMBER as well", code="data.alpha-without-clients")
        who: str | Partitioner | None = client or None
        if clients:
            who = Dirichlet(clients, alpha, seed) if alpha else Uniform(clients, seed)
        frame = read_table(file)
        taken: dict[str, Any] = {"schema": schema}
        if schema is None:
            if not target:
                text = f"name the column to predict, as --target {frame.columns[-1]!r}"
                raise DatasetError(text, code="data.no-target")
            taken = {
                "target": target,
                "features": _features(list(frame.columns), features, drop, {client, target}),
                "columns": _columns(list(frame.columns), categories or [], settings or []),
                "missing": missing,
                "provenance": f"Made from {file.name} by umbel data import.",
            }
        data = from_dataframe(
            frame,
            client=who,
            **taken,
            standardise=standardise,
            validation=_share(validation),
            test=_share(test),
            seed=seed,
            source=file,
            model=model,
            loss=loss,
        )
        if model or loss:
            from umbel.client.trial import check_fit  # imports PyTorch, which what is suggested can do without

            check_fit(data.dataset)
        data.write(folder)
        written = open_dataset(folder)
    known = folder.name if folder.parent == umbel_home() / "data" else str(folder)
    _show(written)
    for note in data.notes:
        typer.echo(note)
    if data.test:
        typer.echo(f"Test clients: {data.test.manifest.clients:,}, as dataset {known}/test.")
    for hint in _hints(written):
        typer.echo(hint)
    typer.echo(folder)
    typer.echo(f"Next: umbel run {shlex.quote(f'dataset={known}')}{_fewer(written)}")


def _fewer(data: Dataset) -> str:
    """Return what a run must be asked where there are fewer clients than it asks for by default."""
    train = data.manifest.train
    return f" clients-per-round={train}" if train < RunConfig().clients_per_round else ""


def _features(known: Sequence[str], features: str, drop: str, others: set[str]) -> list[str]:
    chosen, dropped = _words(features), _words(drop)
    if strange := [name for name in (*chosen, *dropped) if name not in known]:
        text = f"there is no column {strange[0]!r}; the table has {', '.join(known)}"
        raise DatasetError(text, code="data.unknown-column")
    return [name for name in chosen or known if name not in dropped and (chosen or name not in others)]


def _columns(known: Sequence[str], categories: Sequence[str], settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    columns: dict[str, dict[str, Any]] = {}
    for word in categories:
        name, equals, listed = (word, "", "") if word in known else word.partition("=")
        columns.setdefault(name, {})["categories"] = _words(listed) if equals else True
    for word in settings:
        path, equals, text = word.partition("=")
        name, dot, entry = path.rpartition(".")
        if not (equals and dot and entry in Column.names()[1:]):
            text = f"--set takes COLUMN.ENTRY=VALUE, with an entry of {', '.join(Column.names()[1:])}, got {word!r}"
            raise DatasetError(text, code="data.bad-set")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:  # text, as a shell hands it over
            value = text
        columns.setdefault(name, {})[entry] = value
    return columns


def _share(text: str) -> float | list[str]:
    try:
        return float(text)
    except ValueError:
        return _words(text)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _show(data: Dataset) -> None:
    manifest, lengths = data.manifest, data.lengths
    lines: dict[str, str] = {
        "name": manifest.name,
        "clients": f"{manifest.split['train']:,} training, {manifest.split['validation']:,} validation",
        "part": f"{manifest.part}, with the rows of {len(lengths):,} clients" if manifest.part else "",
        "rows": f"{len(data.targets):,}; {_spread(lengths)} a client",
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
        table.add_row(key, lines[key])
    terminal = console()
    terminal.print(table)
    if manifest.layout is not None:
        terminal.print(_columns_of(manifest.layout))


def _columns_of(schema: Schema) -> Table:
    table = Table("column", "role", "type", "holds", "a model sees", box=None)
    roles = [*((column, "feature") for column in schema.features), (schema.target, "target")]
    for column, role in [*([(schema.client, "client")] if schema.client else []), *roles]:
        table.add_row(column.name, role, column.type, _holds(column), _seen(column, role))
    return table


def _holds(column: Column) -> str:
    if column.type == "category":
        return ", ".join(column.classes)
    limits = [f"{low:,.10g}" if low is not None else "" for low in (column.minimum, column.maximum)]
    return " ".join(filter(None, (f"{limits[0]} to {limits[1]}" if any(limits) else "", column.unit)))


def _seen(column: Column, role: str) -> str:
    if role == "client":
        return "nothing"
    if column.type == "boolean":
        return "-1 or 1" if role == "target" else "0 or 1"
    if column.type == "category" and role == "target":
        return f"classes 0 to {len(column.classes) - 1}"
    if column.type == "category" and column.encode == "one-hot":
        return f"{len(column.classes)} numbers, 0 or 1"
    shifted = f"({column.name} - {column.offset:g})" if column.offset else column.name
    return f"{shifted} / {column.scale:g}" if (column.scale, column.offset) != (1, 0) else "as it is"


def _target(data: Dataset) -> str:
    target: Mapping[str, Any] = data.manifest.units.get("target", {})
    shape = f" {data.targets.shape[1:]}" if data.targets.ndim > 1 else ""
    told = [str(target.get("name", "")), str(target.get("unit", "")), ", ".join(target.get("categories", []))]
    return "; ".join([*filter(None, told), f"{data.targets.dtype}{shape}"])


def _spread(lengths: Any) -> str:
    low, middle, high = int(lengths.min()), float(np.median(lengths)), int(lengths.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}, median {middle:,.10g}"


def _hints(data: Dataset) -> list[str]:
    """Say which numbers are large, because a model hardly learns from them."""
    schema = data.manifest.layout
    assert schema is not None
    hints, place = [], 0
    for column in (*schema.features, schema.target):
        values = data.targets if column is schema.target else data.features[:, place]
        place += len(column.stored)
        if column.type in ("number", "integer") and (stored := float(np.abs(values).max())) > _LARGE:
            top = stored * column.scale
            hints.append(
                f"{column.name} reaches {top:,.6g}, and models learn best from numbers near 1: give a constant, as "
                f"--set {column.name!r}.scale={10 ** np.rint(np.log10(top)):.0f}, or, for simulation alone, "
                "--standardise."
            )
    return hints
