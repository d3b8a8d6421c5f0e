"""Benchmarks in the tests' own process, on small data in the hospital's shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from typer import Typer
from typer.testing import CliRunner

import umbel
from benchmarks import scale


def invoked(main: Callable[..., None], *options: str) -> Result:
    """Call a benchmark's command."""
    app = Typer()
    app.command()(main)
    return CliRunner().invoke(app, [*options])


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No processes apart, which import everything again; this one is left as it was."""
    monkeypatch.setattr(scale, "apart", lambda work, *args: work(*args))
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
