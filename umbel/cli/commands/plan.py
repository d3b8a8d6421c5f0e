"""``umbel plan``: what a run would cost its clients, or what noise a wanted guarantee takes, before anything is run."""

from __future__ import annotations

from typing import Annotated

import typer

from umbel.cli.commands.planned import show
from umbel.cli.plans import plan
from umbel.privacy.accounting.guarantee import DELTA
from umbel.protocol.cli import errors_in_one_line

app = typer.Typer(add_completion=False)


@app.command()
def command(
    config: Annotated[
        str,
        typer.Argument(
            metavar="[CONFIG]",
            help="A TOML file of run-config values, or the name of one in configs/: its model and its dataset give "
            "the numbers, and clients' first updates the clip norm. In place of n, k, the clients and U.",
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
) -> None:
    """Print what a run would cost its clients, or what noise a wanted guarantee takes, before anything is run."""
    with errors_in_one_line():
        planned = plan(
            config,
            parameters=parameters,
            hypotheses=hypotheses,
            clients=clients,
            clients_per_round=clients_per_round,
            mechanism=mechanism,
            noise_multiplier=noise_multiplier,
            rounds=rounds,
            target_epsilon=target_epsilon,
            participations=participations,
            choice_epsilon=choice_epsilon,
            delta=delta,
        )
    show(planned)
