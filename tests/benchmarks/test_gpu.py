"""The GPU benchmark, tried at a small size on a GPU that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tests.benchmarks.conftest import invoked
from tests.helpers.fake_gpu import fake_gpu

pytestmark = pytest.mark.rest


@pytest.fixture
def one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contestants go once, without a turn to warm up."""
    monkeypatch.setattr(
        gpu, "interleave", lambda contestants, times: {name: [go()] for name, go in contestants.items()}
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert invoked(gpu.main).exit_code == 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_turn")
def test_both_forms_and_plain_pytorch_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_gpu():
        gpu.cohort_of(1, 1, torch.device("cuda"), tmp_path)
    printed = capsys.readouterr().out
    for contestant in ("batched", "loop", "plain PyTorch, one client at a time"):
        assert int(printed.split(f"{contestant}: ")[1].split(" MiB at most")[0]) > 4, "a network has 4.6 MiB"
    batched, loop, _ = (line.split("│")[5].strip() for line in printed.splitlines() if line.startswith("│"))
    assert float(batched) == pytest.approx(float(loop), abs=2e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("one_turn")
def test_rounds_of_colour_images_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_gpu():
        gpu.rounds_like_cifar(1, "cuda", tmp_path, clients=2, rows=4, rounds=1)
    assert "2 of 2 clients a round" in capsys.readouterr().out
