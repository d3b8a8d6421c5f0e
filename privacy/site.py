"""What a node knows about itself, from where it runs and from its own configuration.

Nothing here reads a message: a server must not be able to tell a site that it is simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import SiteError

DATA_PATH = "data-path"
GEONAMES_PATH = "geonames-path"
PLACE = "place"
INSECURE_SEED = "insecure-seed"
KEEP_MODEL = "keep-model"

_in_process: ContextVar[bool] = ContextVar("umbel_in_process", default=False)


@contextmanager
def in_process() -> Iterator[None]:
    """Mark what runs inside as a simulation in this process (for `simulation.grid` alone)."""
    token = _in_process.set(True)
    try:
        yield
    finally:
        _in_process.reset(token)


def runs_in_simulation() -> bool:
    """Return whether this code runs in a Ray worker or in the in-process grid."""
    if _in_process.get():
        return True
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


@dataclass(frozen=True)
class Site:
    """A node, as far as privacy is concerned.

    Attributes
    ----------
    data_path : Path or None
        The data this node's own configuration names; None in simulation, where the node serves
        a part of the run config's federation.
    geonames_path : Path or None
        GeoNames' postal codes, by which the places of a table of charges are found.
    first, step : int
        The node hosts the federation's clients ``first, first + step, ...``: in simulation, and
        where the site's own ``place`` says so.
    insecure_seed : bool
        Whether a site with data of its own draws everything from the run's seed, noise too, for
        tests on data that are nobody's: the server knows that seed and can subtract the noise.
    keep_model : Path or None
        Folder for each client's best hypothesis at the end of a run.
    """

    data_path: Path | None
    first: int = 0
    step: int = 1
    geonames_path: Path | None = None
    insecure_seed: bool = False
    keep_model: Path | None = None

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Site:
        """Return the site that a node configuration describes.

        Raises
        ------
        SiteError
            When the node is no simulation and names no data of its own.
        """
        # The site's own path is asked for first: real nodes may have a partition-id as well.
        if node_config.get(DATA_PATH):
            first, step = _place(node_config)
            insecure_seed = str(node_config.get(INSECURE_SEED, "false")).lower()
            if insecure_seed not in ("true", "false"):
                raise SiteError(f"{INSECURE_SEED} must be true or false, got {insecure_seed!r}")
            return cls(
                _path(node_config, DATA_PATH),
                first,
                step,
                _path(node_config, GEONAMES_PATH),
                insecure_seed == "true",
                _path(node_config, KEEP_MODEL),
            )
        if not runs_in_simulation():
            raise SiteError(f"this node serves no data: start it with --node-config '{DATA_PATH}=\"/path/to/data\"'")
        return cls(None, int(node_config["partition-id"]), int(node_config["num-partitions"]))

    @property
    def simulated(self) -> bool:
        """Whether the node holds no data of its own."""
        return self.data_path is None

    @property
    def placed(self) -> bool:
        """Whether the node hosts a part of a federation whose other clients other nodes host."""
        return self.simulated or self.step > 1

    def client_ids(self, clients: tuple[int, ...]) -> list[int]:
        """Return the federation-wide numbers of clients counted within the node."""
        return [self.first + self.step * client for client in clients]

    def local_ids(self, clients: Sequence[int]) -> list[int]:
        """Return the numbers within the node of clients counted over the federation."""
        return [(client - self.first) // self.step for client in clients]

    def seed(self, run_config: Mapping[str, Any]) -> int | None:
        """Return the run's seed in simulation, None where the data are the site's own."""
        return int(run_config["seed"]) if self.simulated or self.insecure_seed else None


def _place(node_config: Mapping[str, Any]) -> tuple[int, int]:
    """Return i and n of an entry ``place = "i/n"``, 0 and 1 without one."""
    text = str(node_config.get(PLACE, "0/1"))
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise SiteError(f'{PLACE} must be "i/n" with i from 0 to n - 1, got {text!r}')
    return int(first), int(step)


def _path(node_config: Mapping[str, Any], key: str) -> Path | None:
    """Return an entry that must be an absolute path, because a Flower process may work anywhere."""
    text = str(node_config.get(key, ""))
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise SiteError(f"{key} must be an absolute path, got {text!r}")
    return path
