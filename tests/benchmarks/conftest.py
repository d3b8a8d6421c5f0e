"""Benchmarks in the tests' own process, on small data in the hospital's shape."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import umbel


@pytest.fixture
def left_as_it_was() -> Iterator[None]:
    """What a benchmark sets for its process is as before afterwards."""
    logger, threads = logging.getLogger("flwr"), torch.get_num_threads()
    level = logger.level
    yield
    logger.setLevel(level)
    torch.set_num_threads(threads)


def write_charges(folder: Path, lengths: Sequence[int], train: int) -> str:
    """Write made-up charges of clients with so many rows, of which the first ones train; return the path."""
    rng, clients = np.random.default_rng(0), len(lengths)
    features = rng.uniform(-1, 1, (sum(lengths), 3)).astype(np.float32)
    split = {"train": train, "validation": clients - train}
    manifest = umbel.Manifest(name="charges", clients=clients, split=split, model="mlp", loss="rmse")
    umbel.write_dataset(folder / "charges", manifest, features, features.sum(1) ** 2, np.append(0, np.cumsum(lengths)))
    return str(folder / "charges")
