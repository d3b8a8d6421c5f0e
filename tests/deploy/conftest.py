"""Sites with data of their own, and deployments whose logs a failed test shows."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.deploy.processes import Deployment
from tests.helpers.paper import PAPER
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of the processes' logs where a test fails."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Deployment):
                report.sections.append(("logs of the processes", value.tails()))
    return report
