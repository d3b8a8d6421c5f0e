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
from umbel.server.callbacks import Checkpoints, named
from umbel.server.history import State
from umbel.server.run import Run, initial_hypotheses
from umbel.server.run_folder import RunFolder
from umbel.server.setup import Saved, Setup
from umbel.simulation.grid import InProcessGrid
from umbel.strategies import Callback


class _NoNodeLost(Callback):
    """Ends a run whose simulated node refuses: the run itself is at fault, and retrying cannot help."""

    run: Run

    def after_exchange(self, round: int, stages: dict[str, float]) -> None:
        if self.run.state.history[-1].lost_nodes:
            raise FleetError(f"the simulated node refused in round {round}; the log says why", code="nodes.refused")


def run_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return the app's defaults, overridden by ``configs/NAME.toml`` and then by `changes`.

    In the names of `changes` an underscore stands for a hyphen.
    """
    config = RunConfig().entries() | tomllib.loads((CONFIGS / f"{name}.toml").read_text(encoding="utf-8"))
    config |= {key.replace("_", "-"): value for key, value in changes.items()}
    if unknown := sorted(set(config) - set(RunConfig.names())):
        raise ConfigError(f"{', '.join(unknown)}: not in the run config", code="config.unknown-key")
    return config


def run(config: Mapping[str, Any] | Setup, nodes: int = 1, observers: Sequence[Callback] = ()) -> Path:
    """Run the app in this process, with its log, and return its folder.

    It learns the same as with ``flwr run``: bit-identical with as many nodes, or with ``engine=loop``, and otherwise
    equal up to rounding. Of a mapping, missing entries have their defaults; `observers` come on top of the callbacks in
    the run config. Raises `ConfigError` if that is invalid, and `FleetError` if the nodes refuse; the log says why.
    """
    setup = config if isinstance(config, Setup) else Setup.parse(config)
    grid = InProcessGrid(umbel.client.app.app, setup.config.entries(), nodes)
    return conduct(grid, setup, secrets.randbelow(10**6), observers)


def play(
    config: Mapping[str, Any],
    *,
    nodes: int = 1,
    node_configs: Sequence[Mapping[str, Any]] | None = None,
    observers: Sequence[Callback] = (),
    strict: bool = True,
    saved_in: Path | None = None,
) -> Run:
    """Run the app, and return the finished run; without a folder to save it in, it leaves none.

    If a run of the same configuration was stopped in the folder `saved_in`, it resumes after its last saved round, with
    new simulated nodes, and ends as if it had not been stopped. The model must have no local parameters, since new
    nodes would start with new ones. Nodes are configured alike, or as sites configure them (`node_configs`).
    Raises `FleetError` if a node refuses and the run is `strict`; the reason is in the log.
    """
    resumes = saved_in is not None and (saved_in / "latest.safetensors").exists()
    setup = Setup.parse({**config, "resume": str(saved_in)} if resumes else config)
    grid = InProcessGrid(umbel.client.app.app, config, nodes, node_configs)
    setup.fleet.roster(grid)
    state = Saved.of(setup).restore(grid) if resumes else State.first(initial_hypotheses(setup, grid))
    callbacks = [*named(setup), *observers, *([_NoNodeLost()] if strict else [])]
    folder = None
    if saved_in is not None:
        folder = RunFolder(saved_in)
        folder.write_config(setup.config.entries(), **setup.digests)
        callbacks.append(Checkpoints())
    run = Run(setup, grid, state, callbacks, folder=folder)
    run.do()
    return run
