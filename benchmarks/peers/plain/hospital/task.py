"""Network, data and training of one client, as in Flower's quickstart for PyTorch."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

State = dict[str, Tensor]


def network() -> nn.Module:
    """Return the network 3 -> 2 -> 1 of 11 parameters, biases at 0."""
    layers = nn.Linear(3, 2), nn.Linear(2, 1)
    for layer in layers:
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


def with_state(state: State) -> nn.Module:
    """Return a network with given parameters."""
    net = network()
    net.load_state_dict(state)
    return net


@lru_cache
def _arrays(folder: str) -> tuple[Tensor, Tensor, list[int], int]:
    features, targets, offsets = (np.load(Path(folder) / f"{name}.npy") for name in ("features", "targets", "offsets"))
    train = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))["split"]["train"]
    return torch.from_numpy(features), torch.from_numpy(targets), offsets.tolist(), train


def load_data(folder: str, client: int) -> tuple[Tensor, Tensor]:
    """Return features (rows, 3) and targets (rows,) of a client."""
    features, targets, offsets, _ = _arrays(folder)
    rows = slice(offsets[client], offsets[client + 1])
    return features[rows], targets[rows]


def trains(folder: str, client: int) -> bool:
    """Return whether a client trains; the others validate."""
    return client < _arrays(folder)[3]


def rmse(net: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    """Return the root mean square error; a tiny number under the root keeps its gradient finite."""
    loss: Tensor = (nn.functional.mse_loss(net(features).squeeze(-1), targets) + 1e-12).sqrt()
    return loss


def losses(hypotheses: list[State], features: Tensor, targets: Tensor) -> list[float]:
    """Return the loss of each hypothesis."""
    with torch.inference_mode():
        return [rmse(with_state(state), features, targets).item() for state in hypotheses]


def train(state: State, features: Tensor, targets: Tensor, epochs: int, step: float, batch: int) -> State:
    """Return the parameters after local training by SGD."""
    net = with_state(state)
    optimizer = torch.optim.SGD(net.parameters(), lr=step)
    loader = DataLoader(TensorDataset(features, targets), batch_size=batch, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            rmse(net, x, y).backward()
            optimizer.step()
    return net.state_dict()


def flatten(state: State) -> Tensor:
    """Return parameters as one vector."""
    return nn.utils.parameters_to_vector(state.values())


def unflatten(vector: Tensor, like: State) -> State:
    """Return a vector as parameters."""
    parts = vector.split([value.numel() for value in like.values()])
    return {name: part.view_as(like[name]) for name, part in zip(like, parts, strict=True)}


def sanitise(start: State, trained: State, multiplier: float, clip_norm_floor: float) -> State:
    """Return trained parameters under Laplace noise of n-dimensional Euclidean distance."""
    update = flatten(trained) - flatten(start)
    n = len(update)
    epsilon = n / (multiplier * max(float(update.norm()), clip_norm_floor))
    direction = torch.randn(n)
    length = torch.distributions.Gamma(float(n), epsilon).sample()
    return unflatten(flatten(trained) + length * direction / direction.norm(), trained)
