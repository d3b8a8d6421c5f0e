"""The hospital experiment as one would write it without a framework: PyTorch and numpy, all in memory.

The yardstick for what umbel adds to it: messages, gate, ledger, strategy, results on disk. Algorithm
and settings are those of `configs/hospital.toml`. Clients are computed together, by `torch.func`,
which takes any network.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.peers.brief import Brief

TINY = 1e-12
CLIP_NORM_FLOOR = 0.01
NETWORK = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))


@dataclass(frozen=True)
class Data:
    """Clients padded to the same number of rows.

    Attributes
    ----------
    features : Tensor, shape (clients, rows, 3)
    targets, share : Tensor, shape (clients, rows)
        `share` is 1 / rows of the client, 0 for padding.
    """

    features: Tensor
    targets: Tensor
    share: Tensor

    @classmethod
    def pad(cls, features: NDArray[np.float32], targets: NDArray[np.float32], offsets: NDArray[np.int64]) -> Data:
        """Give all clients the same number of rows."""
        lengths = np.diff(offsets)
        longest = int(lengths.max())
        x = np.zeros((len(lengths), longest, features.shape[1]), np.float32)
        y, share = np.zeros((2, len(lengths), longest), np.float32)
        for c, length in enumerate(lengths):
            rows = slice(offsets[c], offsets[c + 1])
            x[c, :length], y[c, :length], share[c, :length] = features[rows], targets[rows], 1 / length
        return cls(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(share))

    def part(self, clients: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Return features, targets and shares of some clients."""
        index = torch.from_numpy(clients)
        return self.features[index], self.targets[index], self.share[index]


def rmse(theta: dict[str, Tensor], x: Tensor, y: Tensor, share: Tensor) -> Tensor:
    """Return the root mean square error of one client's rows."""
    outputs = functional_call(NETWORK, theta, (x,)).squeeze(-1)
    mean: Tensor = ((outputs - y).square() * share).sum()
    return (mean + TINY).sqrt()


# Of k hypotheses on all clients, and for each client of its own model.
losses = vmap(vmap(rmse, in_dims=(None, 0, 0, 0)), in_dims=(0, None, None, None))
gradients = vmap(grad(rmse))


def flatten(theta: dict[str, Tensor]) -> NDArray[np.float64]:
    """Return stacked parameters as vectors (m, 11)."""
    return np.concatenate([value.flatten(1).numpy() for value in theta.values()], 1, dtype=np.float64)


def unflatten(vectors: NDArray[np.float64]) -> dict[str, Tensor]:
    """Return vectors (m, 11) as stacked parameters."""
    theta, start = {}, 0
    for name, value in NETWORK.state_dict().items():
        part = torch.from_numpy(vectors[:, start : start + value.numel()]).float()
        theta[name] = part.reshape(len(vectors), *value.shape)
        start += value.numel()
    return theta


def kmeans(points: NDArray[np.float64], centroids: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means of Lloyd's iterations; an empty cluster keeps its centroid."""
    labels = np.full(len(points), -1)
    while True:
        following = np.square(points[:, None] - centroids[None]).sum(2).argmin(1)
        if np.array_equal(following, labels):
            return centroids
        labels, centroids = following, centroids.copy()
        for j in np.unique(labels):
            centroids[j] = points[labels == j].mean(0)


def train(
    data: Data,
    hypotheses: dict[str, Tensor],
    clients: NDArray[np.int64],
    step: float,
    nu: float,
    rng: np.random.Generator,
) -> dict[str, Tensor]:
    """Do a round of training; return the next hypotheses."""
    own = data.part(clients)
    with torch.no_grad():
        chosen = losses(hypotheses, *own).argmin(0)
    start = {name: value[chosen] for name, value in hypotheses.items()}
    update = -step * flatten(gradients(start, *own))
    n = update.shape[1]
    if nu:
        radius = np.maximum(np.linalg.norm(update, axis=1, keepdims=True), CLIP_NORM_FLOOR)
        mixing = np.sqrt(2 * rng.standard_gamma((n + 1) / 2, (len(clients), 1)))
        update += nu * radius / n * mixing * rng.standard_normal((len(clients), n))
    return unflatten(kmeans(flatten(start) + update, flatten(hypotheses)))


def validate(data: Data, hypotheses: dict[str, Tensor], clients: NDArray[np.int64]) -> float:
    """Return the mean loss of clients under their best hypothesis."""
    with torch.no_grad():
        return float(losses(hypotheses, *data.part(clients)).amin(0).mean())


def play(brief: Brief, data: Data, nu: float) -> list[float]:
    """Play a task from its initial hypotheses; return the validation loss of each round and after the last."""
    settings = brief.settings
    rng = np.random.default_rng(0)
    hypotheses = {name: torch.from_numpy(value) for name, value in brief.hypotheses.items()}
    history = []
    for clients, judges in zip(settings.train, settings.validate, strict=False):
        following = train(data, hypotheses, np.array(clients), settings.step_size, nu, rng)
        history.append(validate(data, hypotheses, np.array(judges)))
        hypotheses = following
    return [*history, validate(data, hypotheses, np.array(settings.validate[-1]))]
