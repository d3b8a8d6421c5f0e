"""Benchmarks in the tests' own process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def left_as_it_was() -> Iterator[None]:
    """What a benchmark sets for its process is as before afterwards."""
    logger, threads = logging.getLogger("flwr"), torch.get_num_threads()
    level = logger.level
    yield
    logger.setLevel(level)
    torch.set_num_threads(threads)
