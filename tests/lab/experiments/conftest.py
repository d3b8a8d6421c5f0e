"""What the tests of experiments share: sweeps without workers."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umbel.simulation.sweep
from tests.helpers.datasets import manifest
from tests.helpers.paper import sites_accept_the_paper as sites_accept_the_paper
from umbel.data import offsets_of, write_dataset
from umbel.simulation.sweep import Finished, Spec


def read_csv(folder: Path) -> list[dict[str, str]]:
    with (folder / "table.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def hospitals(umbel_home: Path) -> Path:
    """The place of a small dataset with the shape and the units of the hospitals."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (800, 3)).astype(np.float32)
    y = generator.uniform(0.3, 1, 800).astype(np.float32)
    units = {"target": {"name": "payment", "unit": "dollars", "scale": 10_000.0}}
    own = manifest(150, 250, name="hospital", model="mlp", loss="rmse", units=units)
    write_dataset(umbel_home / "data" / "hospital", own, x, y, offsets_of([2] * 400))
    return umbel_home


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Do the runs in this process instead of in workers; return the names of those that were done."""
    done: list[str] = []

    def each(
        specs: Any, task: Callable[[Mapping[str, Any]], Finished], *_: Any
    ) -> Iterator[tuple[Spec, Finished | None, str]]:
        for spec in specs:
            done.append(spec.name)
            yield spec, *umbel.simulation.sweep._attempt(task, spec.config)

    monkeypatch.setattr(umbel.simulation.sweep, "_each", each)
    return done
