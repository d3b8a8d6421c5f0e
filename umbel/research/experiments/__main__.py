"""Commands: ``umbel experiment`` with the papers' experiments, and the frontier.

An experiment is a module with `specs`, the runs and their arms, `tables`, what it makes of results, and where a run is
not `umbel.research.experiments.runs.finish`, `play`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import click
import typer

from umbel.data import find_dataset
from umbel.protocol.cli import command_group, errors_in_one_line
from umbel.protocol.home import umbel_home
from umbel.research.experiments import (
    attacks,
    chosen_round,
    drift,
    frontier,
    handwriting,
    hospital,
    pac,
    page,
    recommender,
    synthetic,
)
from umbel.research.experiments.runs import finish
from umbel.research.experiments.sweep import FIRST_SEED, sweep
from umbel.research.experiments.tables import good, trained

app = command_group("The papers' experiments, and the frontier.")

Seeds = Annotated[int | None, typer.Option(min=1, help="Runs of each kind.", show_default="as in the paper")]
First = Annotated[int, typer.Option("--first-seed", min=0, help="Their seeds begin here.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="At most so many a run.", show_default="as configured")]
Quick = Annotated[bool, typer.Option("--quick", help="A small part of it, in seconds, to see that it works.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder for tables, figures and runs.", show_default="$UMBEL_HOME/experiments/NAME")
]

_EXPERIMENTS: dict[str, tuple[ModuleType, str]] = {
    "synthetic": (synthetic, "Two linear models in the plane: figures 1 and 2, and how often they look like that."),
    "hospital": (hospital, "Hospital charges: figures 3 and 4, and the privacy budgets of Table 1."),
    "drift": (drift, "Clients that change: their data drift, they come and go; old hypotheses, old ledgers."),
    "chosen-round": (chosen_round, "The best round, chosen by exact losses and by means with noise."),
    "attacks": (attacks, "What releases show: the headlines of umbel attack, images and local vectors."),
    "femnist": (handwriting, "Handwritten characters: the accuracies of Table 2."),
    "qmnist": (handwriting, "Handwritten digits: Table 2's grid on data that two cores can learn."),
}


def _add(name: str, module: ModuleType, text: str) -> None:
    def plain(seeds: Seeds = None, first: First = FIRST_SEED, quick: Quick = False, out: Out = None) -> None:
        _run(name, module, out, seeds, first, quick)

    def written(
        seeds: Seeds = None, first: First = FIRST_SEED, rounds: Rounds = None, quick: Quick = False, out: Out = None
    ) -> None:
        _run(name, module, out, seeds, first, quick, dataset=name, rounds=rounds)

    app.command(name, help=text)(written if module is handwriting else plain)


for _name, (_module, _text) in _EXPERIMENTS.items():
    _add(_name, _module, _text)


@app.command("frontier")
def run_frontier(
    task: Annotated[str, typer.Argument(help=" or ".join(frontier.TASKS))] = "hospital",
    seeds: Seeds = None,
    first: First = FIRST_SEED,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Accuracy against the epsilon of a client: heuristic and formal, client and site release."""
    _run(f"frontier-{task}", frontier, out, seeds, first, quick, task=task)


@app.command("recommender")
def run_recommender(
    dataset: Annotated[str, typer.Argument(help="Name or path of a dataset of preferences.")] = "movielens",
    seeds: Seeds = None,
    first: First = FIRST_SEED,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """A recommender beside baselines, on the rows of newcomers."""
    _run("recommender", recommender, out, seeds, first, quick, dataset=dataset)


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
    names: Annotated[list[str], typer.Argument(help=f"Of {', '.join(page.SOURCES)}.", show_default="none")] = [],  # noqa: B006
) -> None:
    """Copy the tables of experiments into docs/results, and write docs/reproduce.md."""
    with errors_in_one_line():
        for name in names:
            page.take(name, _folder(None, name, False))
        typer.echo(page.write())


def _run(
    name: str, module: ModuleType, out: Path | None, seeds: int | None, first: int, quick: bool, **options: Any
) -> None:
    """Do an experiment's runs that are not done yet, and write what they came to."""
    folder = _folder(out, name, quick)
    # Two splits tell whether a deviation is shown.
    seeds = seeds or ((2 if module is recommender else 1) if quick else module.SEEDS)
    try:
        with errors_in_one_line():
            specs = module.specs(folder, seeds=seeds, first=first, quick=quick, **options)
            for dataset in {spec.config["dataset"] for spec in specs}:
                find_dataset(dataset)  # a missing one is named before any work
            results = sweep(specs, folder, getattr(module, "play", finish))
            if any_good := bool(trained(good(results))):
                module.tables(results, folder)
                _stamp(name, folder, (result.spec.config["seed"] for result in results))
    except KeyboardInterrupt:
        typer.echo(f"Stopped. The same command resumes it: {folder}", err=True)
        raise typer.Exit(130) from None
    if any_good:
        typer.echo(folder / "table.md")
    if failed := sum(1 for result in results if result.error):
        typer.echo(f"{failed} of {len(results)} runs failed; the reasons are in {folder / 'failed'}", err=True)
        raise typer.Exit(1)


def _folder(out: Path | None, name: str, quick: bool) -> Path:
    # Apart, so that a quick look does not overwrite the results of hours.
    return out.expanduser().absolute() if out else umbel_home() / "experiments" / (f"{name}-quick" if quick else name)


def _stamp(name: str, folder: Path, seeds: Iterable[int]) -> None:
    """Say beside the tables what made them, and in them that a quick look is no result."""
    if click.get_current_context().params["quick"]:
        page.mark_as_quick(folder)
    # What was typed, but for where results go.
    words = sys.argv[1:]
    if "--out" in words:
        del words[(at := words.index("--out")) : at + 2]
    command = shlex.join(["umbel", "experiment", *words[words[:1] == ["experiment"] :]])
    page.stamp(name, folder, command, seeds)


if __name__ == "__main__":
    app()
