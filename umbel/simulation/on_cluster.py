"""Whole runs on a Ray cluster: the server's side in this process, the ClientApp on the cluster's machines."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from logging import INFO
from pathlib import Path
from typing import Any

from umbel.protocol.flower import log
from umbel.protocol.run_config import RunConfig
from umbel.server.app import conduct
from umbel.simulation import cluster
from umbel.simulation.hosts import RayHosts, environment
from umbel.simulation.ray_grid import Losses, RayGrid


def run(config: Mapping[str, Any], nodes: int = 0, modules: Sequence[Path] = ()) -> Path:
    """Do a run on the cluster that ``RAY_ADDRESS`` names, and return the folder that it leaves behind.

    What it learns is what a run in one process learns. A machine that dies costs a round the clients that it
    hosts; they take part again where another machine has their data, or when it comes back.

    Parameters
    ----------
    config : mapping
        What it lacks is as by default.
    nodes : int
        Simulated nodes; 0 for one a machine, or a GPU.
    modules : sequence of Path
        The user's own, which go along.

    Raises
    ------
    ClusterError
        When the cluster cannot be joined, or does not have all of the dataset.
    ConfigError
        When it cannot be run.
    FleetError
        When the nodes refuse; the reason is in the log.
    """
    config = RunConfig().entries() | RunConfig.current(config)
    with cluster.joined(environment(), modules):
        grid = RayGrid(RayHosts(config), nodes)
        homes = ", ".join(dict.fromkeys(place.machine.name for place in grid.homes.values()))
        log(INFO, "%d simulated nodes live on the Ray cluster, on %s", len(grid.homes), homes)
        return conduct(grid, config, secrets.randbelow(10**6), [Losses()])
