"""The loop takes one client after the other, and lays convolutions out as the CPU likes them best."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.cohorts import CLOSE, score, train
from tests.helpers.models import model_of, tiny_cnn
from umbel.client.cohort import Cohort, LocalUpdate
from umbel.models import LOSSES, METRICS
from umbel.privacy.gate.randomness import streams


class Viewing(nn.Module):
    """A network written as in many a tutorial: it asks for a view of its convolution in the usual order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(32, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.conv(images).relu().view(len(images), -1))
        return logits


@pytest.mark.parametrize("network", [tiny_cnn, Viewing])
def test_a_loop_takes_any_convolution_and_agrees_with_the_batched_form(network: Callable[[], nn.Module]) -> None:
    model = model_of(network.__name__, network, LOSSES["cross-entropy"], METRICS["accuracy"])
    rng = np.random.default_rng(0)
    cohort = Cohort(
        torch.from_numpy(rng.standard_normal((9, 1, 6, 6), np.float32)), torch.arange(9) % 3, np.array([4, 5])
    )
    hypotheses = {name: np.stack([model.initial(seed)[name] for seed in (0, 1)]) for name in model.shapes}
    update, chosen = LocalUpdate(local_epochs=2, step_size=0.1, batch_size=2), np.array([1, 0])
    results = []
    for engine in ("loop", "batched"):
        trained = train(model, hypotheses, chosen, cohort, update, streams(0, "shuffle", 1, [0, 1]), engine)
        results.append({**trained, "losses": score(model, hypotheses, cohort, engine)[0]})
    for name in results[0]:
        np.testing.assert_allclose(results[0][name], results[1][name], **CLOSE)
