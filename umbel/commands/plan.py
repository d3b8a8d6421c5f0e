"""``umbel plan``: what a run would cost its clients, or what noise a wanted guarantee takes, before anything is run."""

from __future__ import annotations

from typing import Annotated

import typer

from mechanisms.guarantee import DELTA
from mechanisms.plan import Task, plan, plan_for, what_helps
from protocol.cli import errors_in_one_line
from protocol.errors import ConfigError
from protocol.release import LAPLACE
from protocol.run_config import RunConfig
from umbel.commands.planned import show

app = typer.Typer()


@app.command()
def command(
    config: Annotated[
        str,
        typer.Argument(
            metavar="[CONFIG]",
            help="A TOML file of run-config values, or the name of one in configs/: its model and its federation give "
            "the numbers, and clients' first updates the radius. In place of n, k, the clients and U.",
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
        int, typer.Option(min=1, help="The most often that a client takes part; with --target-epsilon.")
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
    numbers = (parameters, hypotheses, clients, clients_per_round)
    with errors_in_one_line(ValueError):
        if target_epsilon is not None and (noise_multiplier is not None or rounds is not None):
            raise ConfigError("give --noise-multiplier and --rounds, or --target-epsilon and --participations")
        radius = ""
        if config:
            if any(number is not None for number in (*numbers, mechanism)):
                raise ConfigError("a configuration gives n, k, the clients, U and the mechanism itself; leave them out")
            task, run, radius = _measured(config)
            if target_epsilon is None:
                noise_multiplier = run.noise_multiplier if noise_multiplier is None else noise_multiplier
                choice_epsilon = run.choice_epsilon if choice_epsilon is None else choice_epsilon
                rounds = run.rounds if rounds is None else rounds
        elif parameters is None or hypotheses is None or clients is None or clients_per_round is None:
            raise ConfigError("name a CONFIG, or give --parameters, --hypotheses, --clients, --clients-per-round")
        else:
            task = Task(parameters, hypotheses, clients, clients_per_round, mechanism or LAPLACE)
        ways: dict[str, float] = {}
        if target_epsilon is not None:
            wanted = (task, target_epsilon, delta, participations, choice_epsilon)
            figures, ways = plan_for(*wanted), what_helps(*wanted)
        elif noise_multiplier is None or rounds is None:
            raise ConfigError("give --noise-multiplier and --rounds, or --target-epsilon and --participations")
        else:
            figures = plan(task, noise_multiplier, choice_epsilon or 0.0, rounds, delta)
    show(figures, ways, delta, radius)


def _measured(config: str) -> tuple[Task, RunConfig, str]:
    """Return the task of a configuration, the configuration, and how long a client's first update is."""
    # They take PyTorch, which a plan from numbers need not wait for.
    from server.setup import Setup
    from umbel.configs import check, read_values
    from umbel.first_update import first_update

    values = read_values(config)
    check(values)
    setup = Setup.parse(values)
    run, manifest = setup.config, setup.manifest
    assert manifest is not None, "it was checked"
    asked = min(run.clients_per_round, manifest.train)
    task = Task(setup.model.num_parameters, setup.strategy.hypotheses, manifest.train, asked, run.mechanism)
    return task, run, f"{first_update(setup):.3g}"
