"""``umbel plan``: a whole run for a guarantee; and ``umbel price``: the cost of a run from its figures."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tomli_w
import typer
from rich.console import Console
from rich.table import Table

from umbel.cli import plans
from umbel.cli.commands.run import Delta, Epsilon, RowEpsilon, Rows, pairs, parted
from umbel.cli.plans import Figures, ReleaseName, as_toml, write_text
from umbel.privacy.accounting.guarantee import DELTA, amount, gap, guarantee, in_words
from umbel.protocol.cli import command_line
from umbel.protocol.errors import ConfigError
from umbel.protocol.options import parse_options
from umbel.protocol.release import ReleaseBy

Release = Annotated[
    ReleaseName | None,
    typer.Option(
        help="The party that adds the noise: each client, each site to its sum, or all sites together to one sum.",
        show_default="as the strategy says, or client",
    ),
]
Sites = Annotated[int, typer.Option(min=1, help="Number of sites, if these release sums.")]


@command_line
def plan(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|DATASET [KEY=VALUE...]",
            help="A TOML file with run-config values, its name in configs/, or a dataset. KEY=VALUE overrides a value.",
        ),
    ],
    epsilon: Epsilon = None,
    delta: Delta = None,
    row_epsilon: RowEpsilon = None,
    rows: Rows = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the planned run config, for umbel run FILE, or flwr run . --run-config FILE."),
    ] = None,
    release: Release = None,
    sites: Sites = 1,
) -> None:
    """Plan a whole run for a guarantee, and print its settings or write them into a file."""
    config, given = parted(words)
    if not config:
        raise ConfigError("name a configuration or dataset to plan its run", code="config.missing-figure")
    if out is not None and out.suffix != ".toml":
        text = f"flwr run reads a run config only from a file that ends with .toml, not from {out}; rename it"
        raise ConfigError(text, code="config.unwritable")
    wanted = {"epsilon": epsilon, "delta": delta, "row_epsilon": row_epsilon, "rows": rows}
    planned = plans.plan(config, sites=sites, release=release, **wanted, **pairs(given))  # type: ignore[arg-type]
    if out is not None:
        write_text(out, as_toml(planned))
    for line in planned.words:
        typer.echo(line)
    if out is None:
        typer.echo(tomli_w.dumps(planned.values), nl=False)
        return
    file = shlex.quote(str(out))
    typer.echo(f"Next: umbel run {file}, or in Flower's simulation: flwr run . --run-config {file} --stream")


_WHOSE_NOISE = {
    ReleaseBy.SITE: "each site adds it to the sum over its clients",
    ReleaseBy.SECURE: "all sites together add it to one sum",
}


@command_line
def price(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[CONFIG] KEY=VALUE...",
            help="A TOML file with run-config values or its name in configs/, or parameters, hypotheses, clients, "
            "clients-per-round and mechanism. And noise-multiplier and rounds, or target-epsilon and participations; "
            "and choice-epsilon.",
        ),
    ],
    delta: Annotated[float, typer.Option(min=0, max=0.999, help="Delta of the guarantee; 0 for a pure one.")] = DELTA,
    release: Release = None,
    sites: Sites = 1,
) -> None:
    """Print a run's cost in privacy, or the noise that a guarantee needs, and warnings."""
    config, given = parted(words)
    wanted = vars(parse_options(Figures, " ".join(given), "umbel price"))
    figures = plans.price(config, delta=delta, release=release, sites=sites, **wanted)
    each = figures.release
    (pure, epsilon), (most_pure, most) = in_words(figures.median), in_words(figures.maximum)
    between = gap(each) or "between any two data sets of a client, over all its participations; clipping public"
    table = Table("figure", "value", "what it means", title="A planned run")
    add = table.add_row
    whose = f"; {_WHOSE_NOISE[figures.task.by]}" if figures.task.by in _WHOSE_NOISE else ""
    add("noise multiplier", f"{each.noise_multiplier:.4g}", f"of mechanism {each.mechanism}{whose}")
    if each.chooses:
        add("choice-epsilon", f"{each.choice_epsilon:.4g}", "of the randomised choice; 0 leaves it open")
    participations = f"median {figures.median_participations}, most {figures.max_participations}"
    add("participations", participations, "assumed by these figures; set max-participations to the larger number")
    add("pure epsilon", f"median {pure}, most {most_pure}", between)
    add(f"epsilon at delta {delta:g}", f"median {epsilon}, most {most}", "the same, by numerical composition")
    if figures.maximum is not None:
        worst = guarantee({replace(each, hypotheses=min(each.hypotheses, 2)): figures.max_participations}, delta)
        allowed = in_words(worst)[1]
        meaning = "with these as min-noise-multiplier and max-choice-epsilon"
        add("a site's budget", f"{allowed} at delta {delta:g}", meaning)
    often = (figures.median_participations, figures.max_participations)
    paper = (amount(each.paper_spend(times)) for times in often)
    add("paper's budget", "median {}, most {}".format(*paper), "n/nu a participation: a heuristic, no guarantee")
    add("noise against update", f"{figures.noise_left:.3g}", "left in a hypothesis after averaging, in clip norms")
    add("step size x curvature", f"< {figures.largest_curvature_step:.3g}", "or the rounds diverge")
    console = Console()
    console.print(table)
    for warning in figures.warnings:
        console.print(f"Warning: {warning}", style="yellow", soft_wrap=True)
