"""Whole runs of large models against a bare loop, tried with a small network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from benchmarks import big
from tests.benchmarks.conftest import invoked
from umbel.protocol.plugins import trust

pytestmark = pytest.mark.rest

ROWS = 4


def network() -> nn.Module:
    """Return a small network, a user's own."""
    return nn.Linear(ROWS, 3)


def rows(generator: np.random.Generator, count: int) -> Any:
    return generator.standard_normal((count, ROWS), np.float32)


NAME = f"{__name__}:network"
TASK = big.Task(NAME, network, rows, 3)


@pytest.mark.slow
def test_each_contestant_is_timed_also_a_network_that_an_earlier_home_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBEL_HOME", str(tmp_path))
    monkeypatch.setitem(big.TASKS, "small", TASK)
    monkeypatch.delenv("UMBEL_TRUST", raising=False)
    trust(NAME)
    monkeypatch.delenv("UMBEL_TRUST")
    out = tmp_path / "big.txt"
    result = invoked(big.main, "--model", "small", "--times", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    (row,) = (line for line in out.read_text(encoding="utf-8").splitlines() if "small" in line)
    _, _, parameters, *figures, _ = (cell.strip() for cell in row.split("│"))
    assert parameters == "15"
    seconds, memory = [float(figures[i]) for i in (0, 1, 3)], [int(figure) for figure in figures[-2:]]
    assert seconds[0] < min(seconds[1:]), "a run does more than the bare loop"
    assert min(memory) > 100, "Python with PyTorch"
