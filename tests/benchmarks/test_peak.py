"""What a round computes is counted as one would by hand, and speeds are operations by seconds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import peak
from tests.benchmarks.conftest import write_charges
from umbel.simulation.in_process import run_config

pytestmark = pytest.mark.rest

CONV1 = 2 * peak.BATCH * (26 * 26 * 32) * (9 * 1)
CONV2 = 2 * peak.BATCH * (24 * 24 * 64) * (9 * 32)
OPERATIONS = {
    "matrix product, 1024 x 1024": 2 * 1024**3,
    "conv1 forwards": CONV1,
    "conv1 backwards": CONV1,  # of the weights alone
    "conv2 forwards": CONV2,
    "conv2 backwards": 2 * CONV2,
    "fc1 forwards": 2 * peak.BATCH * 9216 * 128,
}


def test_each_step_is_as_many_operations_as_by_hand() -> None:
    counted = {}
    for name, step in peak.steps().items():
        with FlopCounterMode(display=False) as counter:
            step()
        counted[name] = counter.get_total_flops()
    assert counted == OPERATIONS


def test_a_rate_is_operations_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([10.0, 10.1, 10.2, 10.4])
    monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    step = peak.steps()["fc1 forwards"]
    assert peak.rate(step) == pytest.approx(2 * OPERATIONS["fc1 forwards"] / 0.4)


def test_the_operations_of_a_part_are_those_of_all_rounds(tmp_path: Path) -> None:
    """The network 3 -> 2 -> 1 has 8 products, with an addition each, a row; each client has 3 rows."""
    config = run_config(
        "hospital", dataset=write_charges(tmp_path, [3] * 20, 12), hypotheses=4, restarts=1, clients_per_round=6,
        validation_clients_per_round=5, patience=0, rounds=2,
    )  # fmt: skip
    chosen, evaluated = 2 * (6 * 3 * 4 * 16), 3 * (5 * 3 * 4 * 16)
    assert peak.count("scoring, to choose and to evaluate", config) == chosen + evaluated
