"""Commands: ``umbel experiment`` with the papers' experiments, and the frontier."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from umbel.data import find_dataset
from umbel.protocol.cli import command_group, errors_in_one_line
from umbel.protocol.home import umbel_home
from umbel.simulation.sweep import FIRST_SEED, Spec, done, sweep
from umbel_lab.experiments import page
from umbel_lab.experiments.page import EXPERIMENTS, Experiment
from umbel_lab.experiments.scaffold import HELD_OUT_ALONE, finish, good, pack, specs, unpack
from umbel_lab.output import Page

app = command_group("The papers' experiments, and the frontier.")
tasks = command_group("Accuracy against a client's epsilon, and without a guarantee.")
app.add_typer(tasks, name="frontier")


def _add(name: str, experiment: Experiment) -> None:
    def command(
        seeds: Annotated[
            int | None, typer.Option(min=1, help="Runs of each kind.", show_default="as in the paper")
        ] = None,
        first: Annotated[int, typer.Option("--first-seed", min=0, help="The first seed.")] = FIRST_SEED,
        rounds: Annotated[
            int | None, typer.Option(min=1, help="Maximum rounds of a run.", show_default="as configured")
        ] = None,
        quick: Annotated[
            bool, typer.Option("--quick", help="Only a small part, in at most a minute, as a test.")
        ] = False,
        out: Annotated[
            Path | None,
            typer.Option(help="Folder for tables, figures and runs.", show_default="$UMBEL_HOME/experiments/NAME"),
        ] = None,
        workers: Annotated[
            int | None, typer.Option(min=1, help="Parallel runs on this machine.", show_default="one per core")
        ] = None,
        tables: Annotated[bool, typer.Option("--tables", help="Start no runs: make tables of finished ones.")] = False,
        keep: Annotated[
            bool,
            typer.Option("--keep", help="Keep finished runs that other code or versions made; the tables name them."),
        ] = False,
    ) -> None:
        folder = _folder(out, name, quick)
        module = import_module(f"umbel_lab.experiments.{experiment.module}")
        if not hasattr(module, "SEEDS"):
            with errors_in_one_line():
                _write(name, folder, [first], quick, partial(module.page, first, folder, quick))
            typer.echo(folder / "table.md")
            return
        last = first + (seeds or (1 if quick else module.SEEDS))
        run = partial(done, keep=keep) if tables else partial(sweep, workers=workers, keep=keep)
        _run(name, experiment, folder, run, range(first, last), rounds, quick)

    group, _, task = name.partition("frontier-")
    (tasks if task else app).command(task or group, help=experiment.text)(command)


for _name, _experiment in EXPERIMENTS.items():
    _add(_name, _experiment)


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
    names: Annotated[list[str], typer.Argument(help=f"Of {', '.join(EXPERIMENTS)}.", show_default="none")] = [],  # noqa: B006
) -> None:
    """Copy the tables of experiments into docs/results, and write the pages that have them."""
    with errors_in_one_line():
        for name in names:
            page.take(name, _folder(None, name, False))
        typer.echo("\n".join(map(str, page.write())))


def _run(
    name: str, experiment: Experiment, folder: Path, run: Any, seeds: range, rounds: int | None, quick: bool
) -> None:
    """Do an experiment's remaining runs, and write the results."""
    module = import_module(f"umbel_lab.experiments.{experiment.module}")
    try:
        with errors_in_one_line():
            page.commit_of(quick=quick)  # before hours of work
            runs = shortened(specs(module, folder, seeds, quick, experiment.of), rounds)
            for dataset in {spec.config["dataset"] for spec in runs}:
                find_dataset(dataset)  # a missing one is named before any work
            results = run(runs, folder, getattr(module, "play", finish))
            # Runs of clients that train alone make no table.
            if any_good := any(result.spec.config["strategy"] not in HELD_OUT_ALONE for result in good(results)):
                finished = [result.spec.config["seed"] for result in results]
                _write(name, folder, finished, quick, partial(module.page, results))
    except KeyboardInterrupt:
        typer.echo(f"Stopped. The same command resumes it: {folder}", err=True)
        raise typer.Exit(130) from None
    if any_good:
        typer.echo(folder / "table.md")
    if failed := sum(1 for result in results if result.error):
        typer.echo(f"{failed} of {len(results)} runs failed; the reasons are in {folder / 'failed'}", err=True)
        raise typer.Exit(1)


def shortened(specs: Sequence[Spec], rounds: int | None) -> list[Spec]:
    """Return the runs with at most so many rounds; None leaves them as they are."""
    if rounds is None:
        return list(specs)
    lengths = [min(rounds, spec.config.get("rounds", rounds)) for spec in specs]
    return [replace(one, config={**one.config, "rounds": most}) for one, most in zip(specs, lengths, strict=True)]


def _folder(out: Path | None, name: str, quick: bool) -> Path:
    # Separate, so that a quick look does not overwrite the results of hours.
    return out.expanduser().absolute() if out else umbel_home() / "experiments" / (f"{name}-quick" if quick else name)


def _write(name: str, folder: Path, seeds: Iterable[int], quick: bool, make: partial[Page]) -> None:
    """Write an experiment's page and how they were made, and in them that a quick look is not a result."""
    commit = page.commit_of(quick=quick)
    make().write(folder)
    if quick:
        page.mark_as_quick(folder)
    # The command as typed, without the results' folder and the number of parallel runs.
    words = sys.argv[1:]
    for option in {"--out", "--workers"} & {*words}:
        del words[(at := words.index(option)) : at + 2]
    command = shlex.join(["umbel", "experiment", *words[words[:1] == ["experiment"] :]])
    page.stamp(name, folder, command, seeds, commit)


if __name__ == "__main__":
    app()
