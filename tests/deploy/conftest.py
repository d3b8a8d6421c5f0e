"""Sites with data of their own, deployments of them, and the logs of those whose test fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.deploy.processes import Deployment, Member
from tests.helpers.paper import ACCEPTED, PAPER
from umbel.data import Manifest, offsets_of, write_dataset

CLIENTS = 4
TRAIN = CLIENTS - 1

SHORT: dict[str, Any] = {
    **{key.replace("-", "_"): value for key, value in PAPER.items() if key != "clients-per-round"},
    "dataset": "",
    "model": "linear",
    "loss": "mse",
    "restarts": 1,
    "wait": "nodes=3",
}
"""Run config of small runs over sites that serve their own data, and accept the paper's settings."""


def write_site(folder: Path, slope: float, clients: int = CLIENTS) -> str:
    """Write a dataset whose last client is for validation, and return its path."""
    generator = np.random.default_rng(round(1000 * abs(slope)))
    features = generator.uniform(-1, 1, (10 * clients, 2)).astype(np.float32)
    targets = (slope * features[:, 0] + features[:, 1]).astype(np.float32)
    manifest = Manifest(
        name=folder.name, clients=clients, split={"train": clients - 1, "validation": 1}, model="linear", loss="mse"
    )
    write_dataset(folder, manifest, features, targets, offsets_of([10] * clients))
    return str(folder)


def start_site(deployment: Deployment, name: str, slope: float = 0.0, ahead: float = 0.0, **policy: Any) -> Member:
    """Start a site with a dataset of its own, which accepts the paper's settings and may be told to tamper."""
    data = {"data-path": write_site(deployment.folder / "data" / name, slope or len(name))}
    return deployment.start_node(name, tampered=True, ahead=ahead, **ACCEPTED | data | policy)


@contextmanager
def deployed(folder: Path, *names: str, **options: Any) -> Iterator[Deployment]:
    """Start a server and sites of these names; by default Flower notices soon that a process is gone."""
    with Deployment(folder, **{"soon": True} | options) as deployment:
        for name in names:
            start_site(deployment, name)
        deployment.wait_until_online()
        yield deployment


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of the processes' logs where a test fails."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Deployment):
                report.sections.append(("logs of the processes", value.tails()))
    return report
