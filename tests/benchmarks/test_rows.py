"""The benchmark of DP-SGD: it compares like with like."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peers.play_opacus import CLIP_NORM, NETWORKS
from benchmarks.rows import _bare, _ours

pytestmark = pytest.mark.rest


@pytest.mark.parametrize("name", list(NETWORKS))
def test_a_step_trains_what_the_network_trains_and_clips_each_row(name: str) -> None:
    torch.manual_seed(1)
    network, rows, targets = NETWORKS[name](), torch.rand(5, 784), torch.randint(0, 10, (5,))
    sums, step = _ours(network, rows, targets)
    trained = {key for key, value in network.named_parameters() if value.requires_grad}
    assert set(sums) == set(step()) == trained
    assert len(_bare(network, rows, targets)()) == len(trained)
    norm = torch.sqrt(sum((value.square().sum() for value in sums.values()), torch.zeros(())))
    assert 0 < norm <= len(rows) * CLIP_NORM
