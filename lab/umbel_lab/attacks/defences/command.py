"""``umbel audit``: whether a privacy mechanism of any package keeps its claim."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from umbel.protocol.cli import errors_in_one_line
from umbel_lab.attacks.defences.page import page
from umbel_lab.attacks.defences.process import Target
from umbel_lab.attacks.defences.report import CANARIES, ROUNDS, Options, audit

app = typer.Typer(add_completion=False)


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
    parameters: Annotated[
        int,
        typer.Option(
            min=0, help="Number of your model's parameters: also read the target's own account for that size. 0: no."
        ),
    ] = 0,
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
            rounds, canaries, clients, parameters, claim_epsilon, claim_delta, clip_norm,
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
