"""Runs in simulation, from their checks on: in Flower's own, on a Ray cluster, or in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbel.protocol.errors import ConfigError
from umbel.protocol.plugins import own_path
from umbel.protocol.project import OWN_PATH
from umbel.server.runs import home_of_runs
from umbel.simulation import launch
from umbel.simulation.configs import check
from umbel.simulation.relay import Relay


def launched(values: Mapping[str, Any], nodes: int, relay: Relay) -> Path:
    """Do a run in processes of its own, and return its folder.

    They are those of Flower's own simulation, or, where ``RAY_ADDRESS`` names a Ray cluster, hosts on its machines.
    Errors are those of `umbel.simulation.launch.run`, or `umbel.simulation.ray_grid.run`.
    """
    if os.environ.get("RAY_ADDRESS"):  # to import Ray takes a second
        from umbel.simulation import cluster

        if cluster.address():
            with relay.in_this_process():
                cluster.probe()
                check(values, part=True)
                _make_home()
                # What is wrong need not wait for its imports.
                from umbel.simulation import ray_grid

                return ray_grid.run(values, nodes, own_modules(Path.cwd(), values))
    _make_home()
    environment = {OWN_PATH: own_path()}
    launch.run(launch.APP, values, nodes, relay=relay, check=lambda: check(values), environment=environment)
    return Path(relay.folder)


def own_modules(folder: Path, values: Mapping[str, Any]) -> list[Path]:
    """Return the modules and packages in a folder if the run config names one, as ``module:attribute``."""
    own = {path.stem: path for path in folder.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    words = [word for value in values.values() if isinstance(value, str) for word in value.replace(";", " ").split()]
    named = {word.partition(":")[0].partition(".")[0] for word in words if ":" in word and "=" not in word}
    return [path for name, path in own.items() if name.isidentifier() and name != "umbel"] if named & own.keys() else []


def in_this_process(values: Mapping[str, Any], nodes: int) -> Path:
    """Do a run in this process, and return its folder; errors as `umbel.simulation.in_process.run`."""
    check(values)
    _make_home()
    # What is wrong need not wait for its imports.
    from umbel.simulation import in_process

    return in_process.run(values, nodes or 1)


def _make_home() -> None:
    home = home_of_runs()
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{home} cannot be made: {error.strerror}; set UMBEL_HOME to a folder of yours"
        raise ConfigError(text, code="config.home") from None
    if not os.access(home, os.W_OK):
        raise ConfigError(f"{home} cannot be written to; set UMBEL_HOME to a folder of yours", code="config.home")
