"""The benchmark of runs on a GPU, tried on a GPU that is not there, and through ``flwr run`` on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import big, gpu_runs
from benchmarks.measure import Reading
from tests.benchmarks.conftest import invoked
from tests.helpers.fake_gpu import fake_gpu

ROWS = 4


def network() -> torch.nn.Module:
    """Return a small network, a user's own."""
    return torch.nn.Linear(ROWS, 3)


def rows(generator: np.random.Generator, count: int) -> Any:
    return generator.standard_normal((count, ROWS), np.float32)


TASK = big.Task(f"{__name__}:network", network, rows, 3)

pytestmark = pytest.mark.rest


@pytest.fixture
def one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contestants go once, without a turn to warm up; a client has few rows, and the first round counts."""

    def once(contestants: Any, times: int) -> dict[str, list[Reading]]:
        return {name: [go()] for name, go in contestants.items()}

    monkeypatch.setattr(gpu_runs, "interleave", once)
    for name, value in (("ROWS", 4), ("BATCH", 2), ("CLIENTS", 2), ("VALIDATION", 1)):
        monkeypatch.setattr(big, name, value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert invoked(gpu_runs.main).exit_code == 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_turn", "umbel_home")
@pytest.mark.parametrize("name", ["cnn", "small"])
def test_rounds_on_a_gpu_are_timed_with_its_memory(name: str) -> None:
    task = gpu_runs.TASKS.get(name, TASK)
    with fake_gpu() as gpu:
        parameters, *seconds, ratio = gpu_runs.measured(task, 2, 1, 1, "cuda", ray=False)[:4]
    assert gpu.peak > 4 * int(parameters.replace(",", "")), "the network was there"
    bare, run = map(float, seconds)
    assert float(ratio.split()[0]) == pytest.approx(run / bare, rel=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("one_turn", "umbel_home")
def test_rounds_through_flwr_run_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(gpu_runs.TASKS, "small", TASK)
    out = tmp_path / "gpu.txt"
    result = invoked(gpu_runs.main, "--model", "small", "--rounds", "2", "--device", "cpu", "--out", str(out))
    assert result.exit_code == 0, result.output
    (row,) = (line for line in out.read_text(encoding="utf-8").splitlines() if "│ small" in line)
    _, _, parameters, bare, run, *_ = (cell.strip() for cell in row.split("│"))
    assert parameters == "15"
    assert 0 < float(bare) < float(run), "Flower's messages take longer"
    assert "num-supernodes=1" in out.read_text(encoding="utf-8")


def test_the_gpu_is_watched_from_its_first_to_its_last_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "said"
    said.write_text("0, 10\n0, 20\n40, 500\n80, 700\n0, 20\n60, 600\n0, 10\n")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\nhead -n 1 "{said}"; sed -i 1d "{said}"\n[ -s "{said}" ] || exit 1\n')
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpu_runs, "_LOOK_S", 0.0)
    meter = gpu_runs.Meter()
    over = np.inf
    with meter.watching():
        while said.stat().st_size and over:
            pass
    assert (meter.busy, meter.most) == ("45", "700")


def test_without_the_tool_nothing_is_said_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    meter = gpu_runs.Meter()
    with meter.watching():
        pass
    assert (meter.busy, meter.most) == ("", "")
