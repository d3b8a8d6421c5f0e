"""The batched learner computes the clients of a chunk at once: dense layers as stacked products, the rest by vmap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import umbel.client.learner
from tests.helpers.cohorts import CPU, cohort_of, linear, score
from umbel import models
from umbel.client.batched import Batched, dense_layers
from umbel.client.cohort import Cohort
from umbel.models import LOSSES, METRICS, Model

# --- dense layers


def half_frozen() -> nn.Module:
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    network[0].requires_grad_(False)
    return network


@pytest.mark.parametrize(
    "network",
    [
        lambda: nn.Linear(3, 2),
        lambda: nn.Linear(3, 2, bias=False),
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2), nn.Sigmoid()), nn.Linear(2, 1)
        ),
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Identity(), nn.Linear(4, 4, bias=False)),
        lambda: nn.Sequential(nn.Linear(3, 4), relu := nn.ReLU(), nn.Linear(4, 4), relu, nn.Linear(4, 1)),
        models.load("mlp inputs=3 hidden=4,2 outputs=1").network,
        models.load("mlp inputs=3 hidden=4,2 outputs=1 offset=1,2,3 scale=4,5,6").network,
        half_frozen,
    ],
)
def test_a_chain_of_dense_layers_gives_what_each_network_gives_by_itself(network: Any) -> None:
    """But frozen layers, which a chain would not find among a client's own, are left to vmap, and count."""
    model = Model("dense", network, LOSSES["mse"], METRICS["rmse"])
    generator = torch.Generator().manual_seed(0)
    parameters = {name: torch.randn(5, *shape, generator=generator) for name, shape in model.shapes.items()}
    inputs = torch.randn(5, 7, 3, generator=generator)
    assert dense_layers(model.module) is not None
    expected = [model.apply({n: v[c] for n, v in parameters.items()}, inputs[c]) for c in range(5)]
    torch.testing.assert_close(Batched(model, CPU).forward(parameters, inputs), torch.stack(expected))


def test_other_networks_are_left_to_vmap() -> None:
    class Doubling(nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    class Doubled(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    hooked = nn.Linear(3, 1)
    hooked.register_forward_hook(lambda _module, _inputs, outputs: 2 * outputs)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))
    layered = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    for module in (Doubling(nn.Linear(3, 1)), Doubled(3, 1), hooked, normed, layered):
        assert dense_layers(module) is None
    model = Model("doubling", lambda: Doubling(nn.Linear(3, 1)), LOSSES["mse"], METRICS["rmse"])
    parameters = {name: torch.ones(2, *shape) for name, shape in model.shapes.items()}
    outputs = Batched(model, CPU).forward(parameters, torch.ones(2, 1, 3))
    torch.testing.assert_close(outputs, torch.full((2, 1, 1), 8.0))


# --- chunks of rows


def test_scoring_goes_by_whole_clients_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    # A row of the linear model holds two inputs and one output, 12 bytes: six rows fit in 72.
    parts: list[list[int]] = []
    original = Batched._sums_of_rows

    def spy(self: Batched, stacked: Any, part: Cohort) -> Any:
        parts.append(part.lengths.tolist())
        return original(self, stacked, part)

    monkeypatch.setattr(Batched, "_sums_of_rows", spy)
    monkeypatch.setattr(umbel.client.learner, "CPU_CHUNK_BYTES", 72)
    cohort = cohort_of(*[(np.ones((rows, 2)), np.full(rows, 3.0)) for rows in (2, 4, 1, 9, 3)])
    losses, _ = score(models.load("linear"), linear([1, 1]), cohort, "batched")
    assert parts == [[2, 4], [1], [9], [3]], "a client larger than a chunk is a chunk of its own"
    assert losses.tolist() == [[1] * 5]
