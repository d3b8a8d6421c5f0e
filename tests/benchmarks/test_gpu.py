"""The GPU benchmark, tried at a small size on a GPU that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tests.helpers.fake_gpu import fake_gpu


def test_a_later_go_keeps_whole_parts_of_the_same_machine() -> None:
    table = "$ python\n\nEPYC, 2 cores\nH100\n# one\n│ 1 │\n# two\n│ 2 │\nstopped before its end\n"
    left = "EPYC, 2\ncores H100\n# two\n│ 2 │\nleft for another go: one\n"
    for made, machine, kept in (
        (table, "EPYC, 2 cores\nH100\n", {"one": "│ 1 │"}),
        (left, "EPYC, 2 cores\nH100\n", {"two": "│ 2 │\n"}),
        (table, "EPYC, 2 cores\nH200\n", {}),
        ("", "EPYC, 2 cores\nH100\n", {}),
    ):
        assert gpu.parts_in(made, machine, ["one", "two", "three"]) == kept


@pytest.mark.rest
@pytest.mark.slow
def test_both_forms_and_plain_pytorch_are_timed_and_rounds_of_colour_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contestants go once, without a turn to warm up."""
    monkeypatch.setattr(gpu, "interleave", lambda contestants, _: {name: [go()] for name, go in contestants.items()})
    with fake_gpu():
        gpu.cohort_of(1, 1, torch.device("cuda"), tmp_path)
        printed = capsys.readouterr().out
        gpu.rounds_like_cifar(1, "cuda", tmp_path, clients=2, rows=4, rounds=1)
    assert "2 of 2 clients a round" in capsys.readouterr().out
    for contestant in ("batched", "loop", "plain PyTorch, one client at a time"):
        assert int(printed.split(f"{contestant}: ")[1].split(" MiB at most")[0]) > 4, "a network has 4.6 MiB"
    batched, loop, _ = (line.split("│")[5].strip() for line in printed.splitlines() if line.startswith("│"))
    assert float(batched) == pytest.approx(float(loop), abs=2e-6)
