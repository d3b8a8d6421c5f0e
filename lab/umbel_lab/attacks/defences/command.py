"""``umbel audit``: whether a privacy mechanism of any package keeps its claim."""

from __future__ import annotations

import json
import math
import sys
from typing import Annotated

import typer

from umbel.privacy.accounting.guarantee import amount
from umbel.protocol.cli import errors_in_one_line
from umbel_lab.attacks.defences.laws import GAUSSIAN, VECTOR
from umbel_lab.attacks.defences.process import Target
from umbel_lab.attacks.defences.report import CANARIES, ROUNDS, Options, Report, audit
from umbel_lab.output import Columns, Page, Section

app = typer.Typer(add_completion=False)

_FIGURES: Columns = {
    "epsilon": lambda row: f"{row['rounds']} round{'s' if row['rounds'] > 1 else ''}",
    "claimed": lambda row: _amount(row["claimed"]),
    "formula": lambda row: _amount(row["formula"]),
    "fitted": lambda row: _interval(row["fitted"], row["low"], row["high"]),
    "proved": lambda row: f"{row['proved'].shown:.3g}",
    "provable at most": "provable:.3g",
}
_FAULTS: Columns = {"fault": "code", "seen": "text", "how to mend": "mend"}


@app.command()
def command(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="PACKAGE:NAME...",
            help="A Flower Mod or strategy wrapper, an NVFlare filter, an Opacus optimizer, or a function of arrays. "
            "Arguments are literals: 'package.module:Name(key=1)'. A class or factory with brackets is called for each "
            "canary.",
        ),
    ],
    mod: Annotated[
        str | None, typer.Option(help="The Mod that the clients of a strategy wrapper run.", show_default="none")
    ] = None,
    claim_epsilon: Annotated[
        float | None, typer.Option(help="The claimed epsilon.", show_default="the target's attributes, or its account")
    ] = None,
    claim_delta: Annotated[
        float | None, typer.Option(help="The claimed delta; 0 for a pure epsilon.", show_default="the same, or 0")
    ] = None,
    clip_norm: Annotated[
        float | None,
        typer.Option(help="The Euclidean norm to which updates are clipped.", show_default="its attributes"),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Audit one round, and this many, with a release of each canary in every round.")
    ] = ROUNDS,
    canaries: Annotated[
        int, typer.Option(min=200, help="Canaries along each of two lines. Proved figures grow with their logarithm.")
    ] = CANARIES,
    clients: Annotated[int, typer.Option(min=0, help="Number of all clients, to judge delta. 0: not known.")] = 0,
    python: Annotated[
        str, typer.Option(help="Interpreter of the target's environment.", show_default="umbel's own")
    ] = sys.executable,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=1 - 1e-9, help="Confidence of proved and fitted figures.")
    ] = Options.confidence,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the audit's draws. The target draws from its own generators.")
    ] = 0,
    timeout: Annotated[
        float,
        typer.Option(
            min=1e-3, help="Maximum seconds for an answer of the target, which may be for all canaries at once."
        ),
    ] = Options.timeout,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of reports.")] = False,
) -> None:
    """Audit a privacy mechanism as it ships: what it claims, what it does, and its faults.

    The target runs in a separate process. Exits with 1 if it has a fault, or if counted guesses refute its claim.
    """
    with errors_in_one_line():
        options = Options(
            rounds, canaries, clients, claim_epsilon, claim_delta, clip_norm,
            Target.parse(mod) if mod else None, python, confidence, seed, timeout,
        )  # fmt: skip
        reports = [audit(target, options) for target in map(Target.parse, targets)]
    if as_json:
        typer.echo(json.dumps([report.as_json() for report in reports], indent=2, allow_nan=False))
    else:
        for report in reports:
            page(report, confidence).show()
    if any(report.failed for report in reports):
        raise typer.Exit(1)


def page(report: Report, confidence: float) -> Page:
    """Return the page of a report."""
    sections = [Section.of(report.target, " ".join(_notes(report, confidence)), _FIGURES, map(vars, report.figures))]
    if report.faults:
        faults = [{**vars(fault), "mend": fault.mend} for fault in report.faults]
        sections.append(Section.of("Faults", "", _FAULTS, faults))
    return Page(report.target, [*sections, Section("", verdict(report))], [])


def verdict(report: Report) -> str:
    """Return one sentence on a report."""
    if report.refuted:
        return "REFUTED: counted guesses prove more than is claimed, beyond chance."
    if report.faults:
        count = len(report.faults)
        return f"{count} fault{'s' if count > 1 else ''}. Mend them before you trust the claim."
    if report.claim.epsilon is None:
        bare = "" if report.noisy else " Without noise, nothing is private."
        return f"Nothing is claimed, so nothing is refuted.{bare}"
    return "No fault found, and the claim is not refuted. That does not prove it."


def _notes(report: Report, confidence: float) -> list[str]:
    """Return the sentences above the figures."""
    claim, whose = report.claim, "row of a batch" if report.rows else "client"
    limit = f"norm {claim.clip_norm:g}" if claim.clip_norm else f"values up to {claim.box:g}" if claim.box else ""
    notes = {
        f"{report.kind}, {report.package}.": True,
        f"Between any two updates of a {whose}, clipped to {limit}, at delta {claim.delta:g}.": limit,
        f"Between updates of a {whose} of norm 1, at delta {claim.delta:g}.": not limit,
        "No clip norm is told; give --clip-norm.": not limit,
        "No epsilon is claimed; give --claim-epsilon to have it tested.": claim.epsilon is None,
        "Clients are taken to clip; name their Mod with --mod to audit both.": report.trusted,
        _law(report): True,
        f"Proved: by counted guesses, at a confidence of {confidence:.4g}.": True,
    }
    return [note for note, applies in notes.items() if applies]


def _law(report: Report) -> str:
    if not report.noisy:
        return "There is no noise, so the formula is infinite."
    if report.law == GAUSSIAN and not report.claim.delta:
        return "Gaussian noise has no epsilon at delta 0; give --claim-delta."
    if report.law == VECTOR:
        norms = "The norms of the noise passed a test for a Laplace law of vectors."
        return f"{norms} The formula uses it; nothing is fitted."
    if not report.law:
        return "The noise is of no law that passed a test, so nothing is fitted."
    return f"Fitted: the noise passed a test for a {report.law} law, which does not see its tails."


def _amount(epsilon: float | None) -> str:
    return "none" if epsilon is None else "infinite" if epsilon == math.inf else amount(epsilon)


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    return "none" if value is None else f"{_amount(value)} ({_amount(low)} to {_amount(high)})"
