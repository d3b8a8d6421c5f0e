"""Commands: ``umbel experiment`` with the papers' experiments, and the frontier."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from umbel.data import find_dataset
from umbel.protocol.cli import errors_in_one_line, fail
from umbel.protocol.home import umbel_home
from umbel.research.experiments import (
    attacks,
    drift,
    frontier,
    handwriting,
    hospital,
    pac,
    page,
    recommender,
    synthetic,
)
from umbel.research.experiments.runs import Spec, finish
from umbel.research.experiments.sweep import FIRST_SEED, Result, Task, sweep
from umbel.research.experiments.tables import good, trained

# Without locals: they hold clients' data.
app = typer.Typer(
    add_completion=False,
    suggest_commands=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help=__doc__,
)

Seeds = Annotated[int | None, typer.Option(min=1, help="Runs of each kind.", show_default="as in the paper")]
First = Annotated[int, typer.Option("--first-seed", min=0, help="Their seeds begin here.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="At most so many a run.", show_default="as configured")]
Quick = Annotated[bool, typer.Option("--quick", help="A small part of it, in seconds, to see that it works.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder for tables, figures and runs.", show_default="$UMBEL_HOME/experiments/NAME")
]


@app.command("synthetic")
def run_synthetic(seeds: Seeds = None, first: First = FIRST_SEED, quick: Quick = False, out: Out = None) -> None:
    """Two linear models in the plane: figures 1 and 2, and how often they look like that."""
    folder = _folder(out, "synthetic", quick)
    _run("synthetic", folder, lambda: synthetic.specs(folder, first=first, **_size(seeds, quick, 1)), synthetic.tables)


@app.command("hospital")
def run_hospital(seeds: Seeds = None, first: First = FIRST_SEED, quick: Quick = False, out: Out = None) -> None:
    """Hospital charges: figures 3 and 4, and the privacy budgets of Table 1."""
    folder = _folder(out, "hospital", quick)
    _run("hospital", folder, lambda: hospital.specs(folder, first=first, **_size(seeds, quick, 1)), hospital.tables)


@app.command("femnist")
def run_femnist(
    seeds: Seeds = None, first: First = FIRST_SEED, rounds: Rounds = None, quick: Quick = False, out: Out = None
) -> None:
    """Handwritten characters: the accuracies of Table 2."""
    _run(
        "femnist",
        _folder(out, "femnist", quick),
        lambda: handwriting.specs("femnist", first=first, rounds=rounds, **_size(seeds, quick, 1)),
        handwriting.tables,
    )


@app.command("qmnist")
def run_qmnist(
    seeds: Seeds = None, first: First = FIRST_SEED, rounds: Rounds = None, quick: Quick = False, out: Out = None
) -> None:
    """Handwritten digits: Table 2's grid on data that two cores can learn."""
    _run(
        "qmnist",
        _folder(out, "qmnist", quick),
        lambda: handwriting.specs("qmnist", first=first, rounds=rounds, **_size(seeds, quick, 1)),
        handwriting.tables,
    )


@app.command("frontier")
def run_frontier(
    task: Annotated[str, typer.Argument(help=" or ".join(frontier.TASKS))] = "hospital",
    seeds: Seeds = None,
    first: First = FIRST_SEED,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Accuracy against the epsilon of a client: heuristic and formal, client and site release."""
    if task not in frontier.TASKS:
        fail(f"there is no frontier of {task!r}; name one of {', '.join(frontier.TASKS)}")
    name = f"frontier-{task}"
    folder = _folder(out, name, quick)
    _run(
        name,
        folder,
        lambda: frontier.specs(task, folder, first=first, **_size(seeds, quick, 1)),
        partial(frontier.tables, task),
        frontier.play,
    )


@app.command("drift")
def run_drift(seeds: Seeds = None, first: First = FIRST_SEED, quick: Quick = False, out: Out = None) -> None:
    """Clients that change: data that drift, clients that come and go, what old hypotheses and ledgers do then."""
    folder = _folder(out, "drift", quick)
    _run("drift", folder, lambda: drift.specs(folder, first=first, **_size(seeds, quick, 1)), drift.tables, drift.play)


@app.command("recommender")
def run_recommender(
    dataset: Annotated[str, typer.Argument(help="Name or path of a dataset of preferences.")] = "movielens",
    seeds: Seeds = None,
    first: First = FIRST_SEED,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """A recommender beside baselines, on the rows of newcomers."""
    folder = _folder(out, "recommender", quick)
    _run(
        "recommender",
        folder,
        lambda: recommender.specs(dataset, folder, first=first, **_size(seeds, quick, 2)),
        recommender.tables,
    )


@app.command("attacks")
def run_attacks(seeds: Seeds = None, first: First = FIRST_SEED, quick: Quick = False, out: Out = None) -> None:
    """What releases show: the headlines of umbel attack, images and local vectors."""
    folder = _folder(out, "attacks", quick)
    _run("attacks", folder, lambda: attacks.specs(first=first, **_size(seeds, quick, 1)), attacks.tables, attacks.play)


@app.command("pac")
def run_pac(
    trials: Annotated[int, typer.Option(min=100, help="Clients attacked without noise; fewer with noise.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of every draw.")] = FIRST_SEED,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """PAC identifiability: Theorems 1 to 3, the Laplace release, Proposition 1."""
    folder = _folder(out, "pac", quick)
    pac.tables(100 if quick else trials, seed, folder)
    _stamp("pac", folder, [seed])
    typer.echo(folder / "table.md")


@app.command("page")
def run_page(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(page.SOURCES)}.", show_default="none")
    ] = None,
) -> None:
    """Take the tables of experiments into docs/results, and write docs/reproduce.md anew."""
    with errors_in_one_line():
        for name in names or []:
            page.take(name, _folder(None, name, False))
        typer.echo(page.write())


def _stamp(name: str, folder: Path, seeds: Iterable[int]) -> None:
    """Say beside the tables what made them, and in them where that was little."""
    if click.get_current_context().params["quick"]:
        page.mark_as_quick(folder)
    page.stamp(name, folder, _command(), seeds)


def _command() -> str:
    """Return what was typed, but for where results go."""
    words = sys.argv[1:]
    if "--out" in words:
        del words[(at := words.index("--out")) : at + 2]
    return shlex.join(["umbel", "experiment", *words[words[:1] == ["experiment"] :]])


def _size(seeds: int | None, quick: bool, few: int) -> dict[str, Any]:
    """Return what limits the number of runs."""
    seeds = seeds or (few if quick else None)
    return {"quick": quick} | ({"seeds": seeds} if seeds else {})


def _folder(out: Path | None, name: str, quick: bool) -> Path:
    # Apart, so that a quick look does not overwrite the results of hours.
    return out.expanduser().absolute() if out else umbel_home() / "experiments" / (f"{name}-quick" if quick else name)


def _run(name: str, folder: Path, specs: Any, tables: Any, task: Task = finish) -> None:
    try:
        with errors_in_one_line():
            results: list[Result] = sweep(_checked(specs()), folder, task)
            if any_good := bool(trained(good(results))):
                tables(results, folder)
                _stamp(name, folder, (result.spec.config["seed"] for result in results))
    except KeyboardInterrupt:
        typer.echo(f"Stopped. The same command goes on from here: {folder}", err=True)
        raise typer.Exit(130) from None
    if any_good:
        typer.echo(folder / "table.md")
    if failed := sum(1 for result in results if result.error):
        typer.echo(f"{failed} of {len(results)} runs failed; the reasons are in {folder / 'failed'}", err=True)
        raise typer.Exit(1)


def _checked(specs: list[Spec]) -> list[Spec]:
    """Raise before any work where a dataset is missing."""
    for name in {spec.config["dataset"] for spec in specs}:
        find_dataset(name)
    return specs


if __name__ == "__main__":
    app()
