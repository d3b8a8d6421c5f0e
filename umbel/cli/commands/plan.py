"""``umbel plan``: what a run would cost its clients, or what noise a wanted guarantee takes, before anything is run."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from umbel.cli.plans import Planned, plan
from umbel.privacy.accounting.guarantee import DELTA, amount, gap, guarantee, in_words
from umbel.protocol.cli import errors_in_one_line

app = typer.Typer(add_completion=False)


@app.command()
def command(
    context: typer.Context,
    config: Annotated[
        str,
        typer.Argument(
            metavar="[CONFIG]",
            help="A TOML file of run-config values, or the name of one in configs/: its model and its dataset give "
            "the numbers. In place of n, k, the clients and U.",
            show_default="none",
        ),
    ] = "",
    parameters: Annotated[int | None, typer.Option(help="n, the number of parameters of the model.")] = None,
    hypotheses: Annotated[int | None, typer.Option(help="k.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of training clients.")] = None,
    clients_per_round: Annotated[int | None, typer.Option(help="U.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="nu; or give --target-epsilon.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds; with --noise-multiplier.")] = None,
    target_epsilon: Annotated[float | None, typer.Option(help="The epsilon that is wanted; nu is worked out.")] = None,
    participations: Annotated[
        int, typer.Option(min=1, help="The most participations of a client; with --target-epsilon.")
    ] = 1,
    choice_epsilon: Annotated[
        float | None,
        typer.Option(help="Of the randomised choice.", show_default="open, or a quarter of the target a participation"),
    ] = None,
    mechanism: Annotated[
        str | None, typer.Option(help="laplace, gaussian, or package.module:Class.", show_default="laplace")
    ] = None,
    delta: Annotated[float, typer.Option(min=0, max=0.999, help="Delta of the (epsilon, delta) guarantee.")] = DELTA,
    public_data: Annotated[
        bool,
        typer.Option(
            "--public-data",
            help="The data of CONFIG are public or made up: measure clients' first updates, for the clip norm.",
        ),
    ] = False,
) -> None:
    """Print what a run would cost its clients, or what noise a wanted guarantee takes, before anything is run."""
    with errors_in_one_line():
        planned = plan(**context.params)
    _show(planned, bool(config))


def _show(planned: Planned, from_config: bool) -> None:
    """Print a plan, what would leave less noise, and what it means where it means trouble."""
    figures, delta = planned.figures, planned.delta
    release = figures.release
    (pure, epsilon), (most_pure, most) = in_words(figures.median), in_words(figures.maximum)
    between = gap(release) or "between any two data sets of a client, over all its participations; clipping public"
    table = Table("figure", "value", "what it means", title="A planned run")
    add = table.add_row
    add("noise multiplier", f"{release.noise_multiplier:.4g}", f"of mechanism {release.mechanism}")
    if release.chooses:
        add("choice-epsilon", f"{release.choice_epsilon:.4g}", "of the randomised choice; 0 leaves it open")
    if planned.radius is not None:
        add("radius", f"{planned.radius:.3g}", "a client's first update: a clip-norm of that, or half of it")
    elif from_config:
        add("radius", "not measured", "it would tell about clients' rows; --public-data measures it")
    participations = f"median {figures.median_participations}, most {figures.max_participations}"
    add("participations", participations, "the figures hold for these: set max-participations to the most")
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
    add("noise against update", f"{figures.noise_left:.3g}", "left in a hypothesis after averaging, in radii")
    add("step size x curvature", f"< {figures.largest_curvature_step:.3g}", "or the rounds diverge")
    console = Console()
    console.print(table)
    for way, factor in sorted(planned.ways.items(), key=lambda pair: -pair[1]):
        console.print(f"With {way} the noise left is {factor:.2f} times less, at the same guarantee.", soft_wrap=True)
    for warning in figures.warnings:
        console.print(f"Warning: {warning}", style="yellow", soft_wrap=True)
