"""One run of an experiment, in this process."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import client.app
from experiments.personal import local_only, measure
from federation import find_federation, open_federation
from protocol.messages import price
from server.rounds import State, initial_hypotheses, run_rounds
from server.run_folder import spend
from server.settings import Settings
from simulation.grid import InProcessGrid
from strategies.base import Outcome

ROOT = Path(__file__).resolve().parents[1]
LOCAL_ONLY = "local-only"
"""Stands for a strategy where validation clients train by themselves, for comparison."""


@dataclass(frozen=True)
class Spec:
    """A run to do.

    Attributes
    ----------
    name : str
        Tells it from the other runs of a sweep; the name of its folder.
    config : dict
        The whole run config. The strategy may also be `LOCAL_ONLY`.
    """

    name: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Played:
    """What came out of a run.

    Attributes
    ----------
    measures : dict
        Numbers by name, as JSON takes them (see `play`).
    state : State or None
        As the run left it; None for clients that train by themselves.
    participations : ndarray of int, shape (training clients,)
    cost : Fraction or None
        What a participation costs; None when nothing bounds it.
    trace : list of Outcome
        The releases of each round, for models of two parameters.
    """

    measures: dict[str, Any]
    state: State | None = None
    participations: NDArray[np.int64] | None = None
    cost: Fraction | None = None
    trace: tuple[Outcome, ...] = ()


def run_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return the app's defaults with ``configs/NAME.toml`` and then `changes` over them.

    In the names of `changes` an underscore stands for a hyphen.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    config: dict[str, Any] = dict(project["tool"]["flwr"]["app"]["config"])
    config |= tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8"))
    changes = {key.replace("_", "-"): value for key, value in changes.items()}
    if unknown := sorted(set(changes) - set(config)):
        raise KeyError(f"{unknown} are no keys of the run config")
    return config | changes


def play(config: Mapping[str, Any]) -> Played:
    """Do a run, from its configuration to what it measured.

    One thread computes, so that the digits do not depend on the number of cores.

    Returns
    -------
    Played
        Its `measures` are ``rounds``, ``stopped``, ``best_round``, ``best_loss`` (the lowest
        validation loss), ``median_budget`` and ``max_budget`` (over training clients; None when
        nothing bounds them), and for the ``best`` and the ``last`` hypotheses what
        `experiments.personal.measure` says.

    Raises
    ------
    RuntimeError
        When the node of the simulation refuses; its reason is in the log.
    """
    torch.set_num_threads(1)
    federation = open_federation(find_federation(str(config["federation"])))
    if config["strategy"] == LOCAL_ONLY:
        settings = Settings.parse({**config, "strategy": "fedavg"})
        return Played({"held_out": local_only(settings, federation)})
    settings = Settings.parse(config)
    strategy = settings.strategy
    grid = InProcessGrid(client.app.app, config)
    start = initial_hypotheses(settings, grid)
    state = State(hypotheses=start, best=start)
    trace: list[Outcome] = []

    def after_round(state: State) -> None:
        entry, outcome = state.history[-1], strategy.outcome
        if entry.lost_nodes:
            raise RuntimeError(f"the simulated node refused in round {entry.number}; the log says why")
        if entry.asked and outcome is not None and outcome.releases is not None:
            trace.append(outcome)

    run_rounds(settings, grid, state, after_round)
    spent = strategy.participations
    cost = price(settings.model.num_parameters, float(config["noise-multiplier"]))
    measures = {
        "rounds": sum(1 for entry in state.history if entry.asked),
        "stopped": state.stopped,
        "best_round": state.best_round,
        "best_loss": state.best_loss,
        "median_budget": None if cost is None else spend(float(np.median(spent)), cost),
        "max_budget": None if cost is None else spend(int(spent.max()), cost),
        "best": measure(settings.model, federation, state.best),
        "last": measure(settings.model, federation, state.hypotheses),
    }
    return Played(measures, state, spent, cost, tuple(trace))
