"""The benchmark of adapters, tried at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import adapters
from umbel import models


@pytest.mark.rest
def test_umbel_and_a_single_adapter_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    ratio = adapters.measure(clients=2, times=1, rounds=1)
    assert ratio.median > 0
    assert "2 clients train adapters" in capsys.readouterr().out


def test_only_adapters_are_trained_and_a_sign_does_not_see_the_next(tmp_path: Path) -> None:
    """Four blocks have 128 x 4 and 4 x 384 numbers each; what comes later changes no score before it."""
    adapters.config_of(tmp_path, 1, 1, "cpu")
    model = models.load(adapters.NETWORK, "cross-entropy")
    assert model.num_parameters == 4 * (128 * 4 + 4 * 384)
    signs = torch.zeros(1, adapters.LENGTH, dtype=torch.int64)
    other = signs.clone()
    other[0, -1] = 1
    with torch.no_grad():
        first, second = (model.apply({}, one)[0] for one in (signs, other))
    assert torch.equal(first[:-1], second[:-1])
    assert not torch.equal(first[-1], second[-1])
