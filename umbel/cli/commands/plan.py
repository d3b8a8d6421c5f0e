"""``umbel plan``: the cost of a run for its clients, or the noise for a wanted guarantee, before the run."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from rich.console import Console
from rich.table import Table

from umbel.cli.commands.run import pairs
from umbel.cli.plans import Figures, Planned, ReleaseName, as_toml, costs, strategy_of
from umbel.privacy.accounting.guarantee import DELTA, amount, gap, guarantee, in_words
from umbel.privacy.accounting.plan import rounded_up
from umbel.privacy.accounting.row_plan import RowTask, row_plan, row_plan_for
from umbel.privacy.accounting.rows import needed_budget
from umbel.protocol.cli import errors_in_one_line
from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import parse_options
from umbel.protocol.release import ReleaseBy, exact
from umbel.simulation.start import values_of
from umbel.simulation.wanted import Wanted

app = typer.Typer(add_completion=False)


_OF_ROWS = {"row_noise_multiplier", "row_rate", "local_steps"}
_WITH_ROWS = {*_OF_ROWS, "participations", "rounds", "hypotheses", "choice_epsilon"}


@app.command()
def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG|DATASET] [KEY=VALUE...]",
            help="A TOML file with run-config values, its name in configs/, or a dataset. With a guarantee or --write, "
            "KEY=VALUE overrides the plan of its run. Otherwise the words are figures: noise-multiplier and rounds, or "
            "participations for --epsilon; choice-epsilon; and, without a configuration, parameters, hypotheses, "
            "clients, clients-per-round and mechanism. With --rows: local-steps, row-rate and row-noise-multiplier.",
            show_default="none",
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="Plan the whole run for this guarantee, as umbel run does; of figures, only the noise."),
    ] = None,
    write: Annotated[Path | None, typer.Option(help="File for the planned run config, for umbel run FILE.")] = None,
    release: Annotated[
        ReleaseName | None,
        typer.Option(
            help="The party that adds the noise: each client, each site to its sum, or all sites together to one sum.",
            show_default="as the strategy says, or client",
        ),
    ] = None,
    sites: Annotated[int, typer.Option(min=1, help="Number of sites, if these release sums.")] = 1,
    delta: Annotated[
        float | None,
        typer.Option(min=0, max=0.999, help="Delta of the (epsilon, delta) guarantee.", show_default=f"{DELTA:g}"),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rows of a typical client. Plans the guarantee of each row by noise in training (DP-SGD), with "
            "--row-epsilon or row-noise-multiplier=VALUE.",
            show_default="none",
        ),
    ] = None,
    row_epsilon: Annotated[
        float | None, typer.Option(help="With --rows: compute the row-noise-multiplier that reaches this epsilon.")
    ] = None,
) -> None:
    """Print a run's cost in privacy before it starts, or the noise that a guarantee needs."""
    with errors_in_one_line():
        named = [word for word in words or [] if "=" not in word]
        pairs_of = [word for word in words or [] if "=" in word]
        if len(named) > 1:
            raise ConfigError(f"{named[-1]!r} is not KEY=VALUE", code="config.two-configurations")
        config = named[0] if named else ""
        if write is not None or (named and (epsilon is not None or rows is not None)):
            own = strategy_of(release, sites, pairs(pairs_of))
            _whole_run(config, own, Wanted(epsilon, delta, row_epsilon, rows), write, sites)
            return
        delta = DELTA if delta is None else delta
        given = parse_options(Figures, " ".join(pairs_of), "umbel plan without a guarantee").given
        if rows is not None:
            if release or sites > 1 or epsilon is not None:
                text = "--release, --sites and --epsilon do not go with --rows; leave them out"
                raise ConfigError(text, code="config.both-ways")
            _of_rows(rows, row_epsilon, delta, given)
            return
        if row_epsilon is not None or _OF_ROWS & given.keys():
            text = f"row-epsilon and {', '.join(sorted(_OF_ROWS))} plan the guarantee of a row; give --rows, too"
            raise ConfigError(text.replace("_", "-"), code="config.missing-figure")
        planned = costs(config, epsilon=epsilon, delta=delta, release=release, sites=sites, **given)
    _show(planned)


def _of_rows(rows: int, target: float | None, delta: float, given: dict[str, Any]) -> None:
    """Plan the guarantee of a row, and print it with the settings that it needs."""
    if others := [name for name in given if name not in _WITH_ROWS]:
        text = f"{others[0].replace('_', '-')} does not go with --rows; leave one out"
        raise ConfigError(text, code="config.both-ways")
    if {"rounds", "participations"} <= given.keys():
        text = "give rounds, if a client takes part in each, or participations; not both"
        raise ConfigError(text, code="config.both-ways")
    noise_multiplier = given.get("row_noise_multiplier")
    if (target is None) is (noise_multiplier is None):
        raise ConfigError("give --row-epsilon or row-noise-multiplier with --rows", code="config.missing-figure")
    rate = given.get("row_rate", 0.1)
    task = RowTask(
        rows,
        rate,
        given.get("local_steps", _steps(rate)),
        given.get("rounds", given.get("participations", 1)),
        given.get("hypotheses", 1),
        given.get("choice_epsilon", 0.0),
    )
    if noise_multiplier is not None:
        planned = row_plan(task, noise_multiplier, delta)
    else:
        assert target is not None, "one of both is given"
        planned = row_plan_for(task, target, delta)
    sigma, batch = planned.noise_multiplier, task.batch
    table = Table("figure", "value", "what it means", title="A planned run, for each row of a client")
    add = table.add_row
    add("row-noise-multiplier", f"{sigma:.4g}", "sigma, noise of a step in clip norms of a row's gradient")
    add("row-rate", f"{task.rate:g}", f"q; about {batch:.4g} rows of {task.rows:,} in a step")
    add("local-steps", f"{task.steps:,}", "of a participation")
    add("participations", f"{task.participations:,}", "assumed by these figures; set max-participations to it")
    if task.hypotheses > 1:
        add("choice-epsilon", f"{task.choice_epsilon:.4g}", "of the randomised choice, which depends on all rows")
    between = "between two data sets of a client that differ by one row, added or removed"
    add(f"epsilon at delta {delta:g}", amount(planned.guarantee.epsilon), between)
    allowed = rounded_up(needed_budget(task.release(sigma), task.participations, delta))
    add("a site's row-budget", f"{allowed:.4g} at delta {delta:g}", "at least, if it has the limits below")
    add("noise against gradient", f"{sigma / batch:.3g}", "in each component of a step's mean gradient, in clip norms")
    console = Console()
    console.print(table)
    settings = f"protect=rows noise-multiplier=0 rows='clip=1 noise={sigma} rate={task.rate} batch={batch:.4g}'"
    settings += f" local-steps={task.steps}"
    console.print(f"Settings: {settings} max-participations={task.participations}", soft_wrap=True)
    limits = f'row-budget="{allowed:.4g} delta={delta:g}" min-row-noise-multiplier={sigma} max-row-rate={task.rate}'
    limits += f" max-local-steps={task.steps} max-hypotheses={task.hypotheses}"
    limits += f" max-choice-epsilon={task.choice_epsilon}" if task.hypotheses > 1 else ""
    console.print(f'A site\'s policy: protect="rows" budget="inf" {limits}', soft_wrap=True)
    for warning in planned.warnings:
        console.print(f"Warning: {warning}", style="yellow", soft_wrap=True)


def _steps(rate: float) -> int:
    """Return the steps of one epoch."""
    return math.ceil(1 / exact(rate)) if 0 < rate <= 1 else 1


def _whole_run(name: str, values: dict[str, Any], wanted: Wanted, write: Path | None, sites: int) -> None:
    """Plan a whole run, print it, and write its run config if wanted."""
    if not name:
        raise ConfigError("name a configuration or dataset to plan its run", code="config.missing-figure")
    planned = values_of(name, values, wanted, sites)
    if write is not None:
        try:
            write.write_text(as_toml(planned), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{write} cannot be written: {error.strerror}", code="config.unwritable") from None
    for line in planned.words:
        typer.echo(line)
    if write is None:
        typer.echo(tomli_w.dumps(planned.values), nl=False)
        return
    typer.echo(f"Next: umbel run {shlex.quote(str(write))}")


_WHOSE_NOISE = {
    ReleaseBy.SITE: "each site adds it to the sum over its clients",
    ReleaseBy.SECURE: "all sites together add it to one sum",
}


def _show(planned: Planned) -> None:
    """Print a plan, and warnings."""
    figures, delta = planned.figures, planned.delta
    release = figures.release
    (pure, epsilon), (most_pure, most) = in_words(figures.median), in_words(figures.maximum)
    between = gap(release) or "between any two data sets of a client, over all its participations; clipping public"
    table = Table("figure", "value", "what it means", title="A planned run")
    add = table.add_row
    whose = f"; {_WHOSE_NOISE[planned.by]}" if planned.by in _WHOSE_NOISE else ""
    add("noise multiplier", f"{release.noise_multiplier:.4g}", f"of mechanism {release.mechanism}{whose}")
    if release.chooses:
        add("choice-epsilon", f"{release.choice_epsilon:.4g}", "of the randomised choice; 0 leaves it open")
    participations = f"median {figures.median_participations}, most {figures.max_participations}"
    add("participations", participations, "assumed by these figures; set max-participations to the larger number")
    add("pure epsilon", f"median {pure}, most {most_pure}", between)
    add(f"epsilon at delta {delta:g}", f"median {epsilon}, most {most}", "the same, by numerical composition")
    if figures.maximum is not None:
        worst = guarantee({replace(release, hypotheses=min(release.hypotheses, 2)): figures.max_participations}, delta)
        allowed = in_words(worst)[1]
        meaning = "with these as min-noise-multiplier and max-choice-epsilon"
        add("a site's budget", f"{allowed} at delta {delta:g}", meaning)
    often = (figures.median_participations, figures.max_participations)
    paper = (amount(release.paper_spend(times)) for times in often)
    add("paper's budget", "median {}, most {}".format(*paper), "n/nu a participation: a heuristic, no guarantee")
    add("noise against update", f"{figures.noise_left:.3g}", "left in a hypothesis after averaging, in clip norms")
    add("step size x curvature", f"< {figures.largest_curvature_step:.3g}", "or the rounds diverge")
    console = Console()
    console.print(table)
    for warning in planned.warnings:
        console.print(f"Warning: {warning}", style="yellow", soft_wrap=True)
