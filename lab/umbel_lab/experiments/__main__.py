"""Commands: ``umbel experiment`` with the papers' experiments, and the frontier.

An experiment is a module with `specs`, the runs and their arms; `tables`, which makes tables of results; and, if a run
is not `umbel.simulation.measured.finish`, `play`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import click
import typer

from umbel.data import find_dataset
from umbel.protocol.cli import command_group, errors_in_one_line
from umbel.protocol.home import umbel_home
from umbel.simulation.measured import finish
from umbel.simulation.sweep import FIRST_SEED, done, pack, sweep, unpack
from umbel_lab.experiments import (
    attacks,
    attacks_on_sums,
    audits,
    centaur,
    chosen_round,
    dlg,
    drift,
    femnist_full,
    frontier,
    handwriting,
    hospital,
    methods,
    own,
    pac,
    page,
    public_tables,
    r_dpcfl,
    recommender,
    secure_digits,
    secure_sums,
    synthetic,
    when,
)
from umbel_lab.experiments.tables import good, trained

app = command_group("The papers' experiments, and the frontier.")

Seeds = Annotated[int | None, typer.Option(min=1, help="Runs of each kind.", show_default="as in the paper")]
First = Annotated[int, typer.Option("--first-seed", min=0, help="The first seed.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Maximum rounds of a run.", show_default="as configured")]
Quick = Annotated[bool, typer.Option("--quick", help="Only a small part, in at most a minute, as a test.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Parallel runs on this machine.", show_default="one per core")]
OnlyTables = Annotated[bool, typer.Option("--tables", help="Start no runs: make tables of finished ones.")]
Keep = Annotated[
    bool,
    typer.Option("--keep", help="Keep finished runs that other code or versions made; the tables name them."),
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for tables, figures and runs.", show_default="$UMBEL_HOME/experiments/NAME")
]

_EXPERIMENTS: dict[str, tuple[ModuleType, str]] = {
    "synthetic": (synthetic, "Two linear models in the plane: figures 1 and 2, over many seeds."),
    "hospital": (hospital, "Hospital charges: figures 3 and 4, and the privacy budgets of Table 1."),
    "drift": (drift, "Clients that change: data that drift, and clients that come, go and return."),
    "chosen-round": (chosen_round, "The best round, chosen by exact losses and by means with noise."),
    "secure-sums": (secure_sums, "Secure sums over 20 sites, beside one trusted sum and site release."),
    "secure-digits": (secure_digits, "Digits of one image each: a whole network, by who adds the noise."),
    "own": (own, "Personalised hypotheses, beside clients that train alone."),
    "methods": (methods, "Methods of personalisation, by guarantee: client, site, secure and row release."),
    "r-dpcfl": (r_dpcfl, "Clusters of clients, one of them small, whose rows have a guarantee."),
    "attacks": (attacks, "The main results of umbel attack: images and local vectors read from releases."),
    "attacks-on-sums": (attacks_on_sums, "Local vectors and images that a server reads from secure sums."),
    "when": (when, "When a run is worth it: errors by clients, parameters and epsilon."),
    "public-tables": (public_tables, "Public tables with default settings: without noise, and at epsilon 8."),
    "femnist": (handwriting, "Handwritten characters: the accuracies of Table 2."),
    "femnist-full": (femnist_full, "Table 2 at full length: all images, up to 500 rounds."),
    "centaur": (centaur, "Handwriting with a guarantee: users with few digits each, and local heads."),
    "qmnist": (handwriting, "Handwritten digits: the settings of Table 2 on a smaller dataset."),
}


def _add(name: str, module: ModuleType, text: str) -> None:
    def plain(
        seeds: Seeds = None,
        first: First = FIRST_SEED,
        quick: Quick = False,
        out: Out = None,
        workers: Workers = None,
        tables: OnlyTables = False,
        keep: Keep = False,
    ) -> None:
        _run(name, module, out, seeds, first, quick, workers, tables, keep)

    def written(
        seeds: Seeds = None,
        first: First = FIRST_SEED,
        rounds: Rounds = None,
        quick: Quick = False,
        out: Out = None,
        workers: Workers = None,
        tables: OnlyTables = False,
        keep: Keep = False,
    ) -> None:
        _run(name, module, out, seeds, first, quick, workers, tables, keep, dataset=name, rounds=rounds)

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
    workers: Workers = None,
) -> None:
    """Accuracy against the epsilon of a client: client, site and central release, and results without a guarantee."""
    _run(f"frontier-{task}", frontier, out, seeds, first, quick, workers, task=task)


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
    seed: Annotated[int, typer.Option(min=0, help="Seed of every draw.")] = FIRST_SEED,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """PAC identifiability: Theorems 1 to 3, the Laplace release, Proposition 1."""
    folder = _folder(out, "pac", quick)
    with errors_in_one_line():
        _write("pac", folder, [seed], quick, lambda: pac.tables(100 if quick else trials, seed, folder))
    typer.echo(folder / "table.md")


@app.command("dlg")
def run_dlg(
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the image, the network, the noise and the attack.")
    ] = FIRST_SEED,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """One image of FEMNIST, read from releases by deep leakage from gradients: figure 5."""
    folder = _folder(out, "dlg", quick)
    with errors_in_one_line():
        _write("dlg", folder, [seed], quick, lambda: dlg.tables(seed, folder, quick))
    typer.echo(folder / "table.md")


@app.command("audits")
def run_audits(
    environments: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the packages' virtual environments; those that are there are used.",
            show_default="in the folder of results",
        ),
    ] = None,
    canaries: Annotated[int, typer.Option(min=200, help="Canaries along each of two lines.")] = audits.CANARIES,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the audits' draws.")] = FIRST_SEED,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Filters and mechanisms of other projects: their claims, and what their noise gives."""
    folder = _folder(out, "audits", quick)
    with errors_in_one_line():
        places = environments.expanduser().absolute() if environments else folder / "environments"
        number = 200 if quick else canaries
        _write("audits", folder, [seed], quick, lambda: audits.tables(number, seed, folder, places, quick))
    typer.echo(folder / "table.md")


@app.command("pack")
def run_pack(
    name: Annotated[str, typer.Argument(help="Name of the experiment.")],
    file: Annotated[Path, typer.Argument(help="File to write, or - for standard output.", allow_dash=True)],
) -> None:
    """Write the results of an experiment's runs, without their arrays, into one small file."""
    lines = [f"{line}\n" for line in pack(_folder(None, name, False))]
    with click.open_file(str(file), "w", encoding="utf-8", atomic=True) as target:
        target.writelines(lines)
    typer.echo(f"{len(lines)} runs", err=True)


@app.command("unpack")
def run_unpack(
    name: Annotated[str, typer.Argument(help="Name of the experiment.")],
    file: Annotated[Path, typer.Argument(help="File that umbel experiment pack wrote.", exists=True, dir_okay=False)],
) -> None:
    """Unpack runs for the experiment, which then need not repeat them with the same code."""
    with errors_in_one_line():
        names = unpack(file.read_text(encoding="utf-8").splitlines(), _folder(None, name, False))
    typer.echo(f"{len(names)} runs")


@app.command("page")
def run_page(
    names: Annotated[list[str], typer.Argument(help=f"Of {', '.join(page.SOURCES)}.", show_default="none")] = [],  # noqa: B006
) -> None:
    """Copy the tables of experiments into docs/results, and write the pages that have them."""
    with errors_in_one_line():
        for name in names:
            page.take(name, _folder(None, name, False))
        typer.echo("\n".join(map(str, page.write())))


def _run(
    name: str,
    module: ModuleType,
    out: Path | None,
    seeds: int | None,
    first: int,
    quick: bool,
    workers: int | None = None,
    only_tables: bool = False,
    keep: bool = False,
    **options: Any,
) -> None:
    """Do an experiment's remaining runs, and write the results."""
    folder = _folder(out, name, quick)
    # Two splits show whether there is a deviation.
    seeds = seeds or ((2 if module is recommender else 1) if quick else module.SEEDS)
    try:
        with errors_in_one_line():
            page.commit_of(quick=quick)  # before hours of work
            specs = module.specs(folder, seeds=seeds, first=first, quick=quick, **options)
            for dataset in {spec.config["dataset"] for spec in specs}:
                find_dataset(dataset)  # a missing one is named before any work
            task = getattr(module, "play", finish)
            results = done(specs, folder, task, keep) if only_tables else sweep(specs, folder, task, workers, keep)
            if any_good := bool(trained(good(results))):
                finished = [result.spec.config["seed"] for result in results]
                _write(name, folder, finished, quick, lambda: module.tables(results, folder))
    except KeyboardInterrupt:
        typer.echo(f"Stopped. The same command resumes it: {folder}", err=True)
        raise typer.Exit(130) from None
    if any_good:
        typer.echo(folder / "table.md")
    if failed := sum(1 for result in results if result.error):
        typer.echo(f"{failed} of {len(results)} runs failed; the reasons are in {folder / 'failed'}", err=True)
        raise typer.Exit(1)


def _folder(out: Path | None, name: str, quick: bool) -> Path:
    # Separate, so that a quick look does not overwrite the results of hours.
    return out.expanduser().absolute() if out else umbel_home() / "experiments" / (f"{name}-quick" if quick else name)


def _write(name: str, folder: Path, seeds: Iterable[int], quick: bool, tables: Callable[[], object]) -> None:
    """Write an experiment's tables and how they were made, and in them that a quick look is not a result."""
    commit = page.commit_of(quick=quick)
    tables()
    if quick:
        page.mark_as_quick(folder)
    # The command as typed, without the results' folder and the number of parallel runs.
    words = sys.argv[1:]
    for option in {"--out", "--workers", "--environments"} & {*words}:
        del words[(at := words.index(option)) : at + 2]
    command = shlex.join(["umbel", "experiment", *words[words[:1] == ["experiment"] :]])
    page.stamp(name, folder, command, seeds, commit)


if __name__ == "__main__":
    app()
