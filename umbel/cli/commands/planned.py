"""A plan in words."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from umbel.cli.plans import Planned
from umbel.privacy.accounting.guarantee import amount, gap, guarantee, in_words


def show(planned: Planned) -> None:
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
    participations = f"median {figures.median_participations}, most {figures.max_participations}"
    add("participations", participations, "expected, over all clients; max-participations bounds them")
    add("pure epsilon", f"median {pure}, most {most_pure}", between)
    add(f"epsilon at delta {delta:g}", f"median {epsilon}, most {most}", "the same, by numerical composition")
    if figures.maximum is not None:
        worst = guarantee({replace(release, hypotheses=min(release.hypotheses, 2)): figures.max_participations}, delta)
        allowed = in_words(worst)[1]
        add(
            "a site's budget",
            f"{allowed} at delta {delta:g}",
            "with these as min-noise-multiplier and max-choice-epsilon",
        )
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
