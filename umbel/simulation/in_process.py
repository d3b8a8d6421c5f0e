"""Whole runs in this process: the server's side, the ClientApp, and a grid between them."""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import umbel.client.app
from umbel.protocol.errors import ConfigError, FleetError
from umbel.protocol.project import CONFIGS
from umbel.protocol.run_config import RunConfig
from umbel.server.app import conduct
from umbel.server.history import State
from umbel.server.observer import Observer, Run
from umbel.server.observers import Patience, named
from umbel.server.rounds import initial_hypotheses, run_rounds
from umbel.server.setup import Setup
from umbel.simulation.grid import InProcessGrid


class _NoNodeLost(Observer):
    """Ends a run whose simulated node refuses: that is a fault of the run, and no chance."""

    def after_round(self, run: Run) -> None:
        entry = run.state.history[-1]
        if entry.lost_nodes:
            raise FleetError(
                f"the simulated node refused in round {entry.number}; the log says why", code="nodes.refused"
            )


def run_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return the app's defaults with ``configs/NAME.toml`` and then `changes` over them.

    In the names of `changes` an underscore stands for a hyphen.
    """
    config = RunConfig().entries() | tomllib.loads((CONFIGS / f"{name}.toml").read_text(encoding="utf-8"))
    config |= {key.replace("_", "-"): value for key, value in changes.items()}
    if unknown := sorted(set(config) - set(RunConfig.names())):
        raise ConfigError(f"{', '.join(unknown)}: no keys of the run config", code="config.unknown-key")
    return config


def run(config: Mapping[str, Any], nodes: int = 1, observers: Sequence[Observer] = ()) -> Path:
    """Do a run as the app does, with its log, and return the folder that it leaves behind.

    What it learns is what a run with ``flwr run`` learns: to the bit with as many nodes, or with ``engine=loop``, and
    to rounding otherwise.

    Parameters
    ----------
    config : mapping
        What it lacks is as by default.
    nodes : int
        Number of simulated nodes.
    observers : sequence of Observer
        Besides those that the run config names.

    Raises
    ------
    ConfigError
        When it cannot be run.
    FleetError
        When the nodes refuse; the reason is in the log.
    """
    config = RunConfig().entries() | RunConfig.current(config)
    return conduct(InProcessGrid(umbel.client.app.app, config, nodes), config, secrets.randbelow(10**6), observers)


def play(
    config: Mapping[str, Any],
    *,
    nodes: int = 1,
    node_configs: Sequence[Mapping[str, Any]] | None = None,
    observers: Sequence[Observer] = (),
    strict: bool = True,
    before: Run | None = None,
) -> Run:
    """Do a run, and return it as it ended; it leaves no folder behind.

    Parameters
    ----------
    config : mapping
        The whole run config.
    nodes : int
        Number of simulated nodes.
    node_configs : sequence of mapping, optional
        Instead of `nodes`: the configuration of each, as a site would write it.
    observers : sequence of Observer
        Besides those that the run config names.
    strict : bool
        Whether a node that refuses ends the run.
    before : Run, optional
        What the same nodes did before: they go on with what they keep, as their ledgers.

    Raises
    ------
    FleetError
        When a node refuses and the run is `strict`; the reason is in the log.
    """
    setup = Setup.parse(config)
    grid = InProcessGrid(umbel.client.app.app, config, nodes, node_configs)
    if before is not None:
        assert isinstance(before.grid, InProcessGrid)
        for context, earlier in zip(grid.contexts.values(), before.grid.contexts.values(), strict=True):
            context.state = earlier.state
    setup.fleet.roster(grid)
    start = initial_hypotheses(setup, grid)
    watching = [Patience(setup.config.patience), *named(setup), *observers, *([_NoNodeLost()] if strict else [])]
    run = Run(setup, grid, State(hypotheses=start, best=start), watching)
    run_rounds(run)
    return run
