"""What noise a guarantee takes for a run config, with the numbers of its model and its federation."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from client.cohort import Cohort, LocalUpdate
from client.learner import learner_for
from mechanisms.guarantee import DELTA
from mechanisms.plan import Task, plan_for, what_helps
from privacy.planned import show
from privacy.randomness import streams
from protocol.arrays import flatten
from protocol.cli import errors_in_one_line, fail
from protocol.errors import ConfigError
from protocol.run_config import RunConfig
from server.rounds import draw_hypotheses
from server.setup import Setup

_MEASURED = 200  # clients whose first update is measured


def plan(
    config: Annotated[Path, typer.Argument(help="A run config's file.", exists=True, dir_okay=False)],
    target_epsilon: Annotated[float, typer.Option(help="Epsilon between any two data sets of a client.")],
    participations: Annotated[int, typer.Option(help="The most often that a client takes part.")] = 1,
    delta: Annotated[float, typer.Option(help="With which it holds; 0 for a pure epsilon.")] = DELTA,
    choice_epsilon: Annotated[float | None, typer.Option(help="By default a quarter of the target.")] = None,
) -> None:
    """Work out nu, radius and choice-epsilon for a guarantee, and what would leave less noise."""
    with errors_in_one_line():
        setup = Setup.parse(RunConfig().entries() | tomllib.loads(config.read_text(encoding="utf-8")))
        federation = setup.open_federation()
        if federation is None or setup.manifest is None:
            raise ConfigError(f'{config} has federation = "": name one, or give the numbers to python -m privacy plan')
        clients = setup.manifest.train
        asked = min(setup.config.clients_per_round, clients)
        try:
            task = Task(setup.model.num_parameters, setup.strategy.hypotheses, clients, asked, setup.config.mechanism)
            wanted = (task, target_epsilon, delta, participations, choice_epsilon)
            figures, ways = plan_for(*wanted), what_helps(*wanted)
        except ValueError as error:
            fail(str(error))
        show(figures, ways, delta, f"{first_update(setup):.3g}")


def first_update(setup: Setup) -> float:
    """Return the median length of a client's first update, over some training clients of a federation at hand."""
    run, federation, model = setup.config, setup.open_federation(), setup.model
    assert federation is not None
    learner = learner_for(model, run.device, run.engine)
    some = range(0, federation.manifest.train, -(-federation.manifest.train // _MEASURED))
    hypotheses = draw_hypotheses(model, setup.strategy.hypotheses, run.seed, 0)
    cohort = Cohort.gather(federation, some, learner.device)
    local = model.initial_local(streams(run.seed, "local", 0, some))
    chosen = learner.choose(hypotheses, cohort, local)
    update = LocalUpdate(run.local_epochs, run.step_size, run.batch_size, run.local_steps)
    trained, _ = learner.train(hypotheses, chosen, cohort, update, streams(run.seed, "shuffle", 1, some), local)
    moved = flatten(trained, np.float64) - flatten(hypotheses, np.float64)[chosen]
    return float(np.median(np.linalg.norm(moved, axis=1)))
