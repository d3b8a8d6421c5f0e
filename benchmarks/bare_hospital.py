"""The hospital experiment as one would write it without a framework: plain PyTorch and numpy, all in memory.

The yardstick for everything that umbel adds to it: messages, gate, ledger, strategy, run folder.
Algorithm and settings are those of `configs/hospital.toml`; its draws are not umbel's, so results
agree in distribution, not in digits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

TINY = 1e-12


@dataclass(frozen=True)
class Data:
    """Clients padded to the same number of rows.

    Attributes
    ----------
    features : Tensor, shape (clients, rows, 3)
    targets, share : Tensor, shape (clients, rows)
        `share` is 1 / rows of the client, 0 for padding.
    train : int
        The first so many clients train, the others validate.
    """

    features: torch.Tensor
    targets: torch.Tensor
    share: torch.Tensor
    train: int

    @classmethod
    def read(cls, folder: Path, train: int) -> Data:
        """Read a federation's arrays."""
        features, targets = np.load(folder / "features.npy"), np.load(folder / "targets.npy")
        offsets = np.load(folder / "offsets.npy")
        lengths = np.diff(offsets)
        longest = int(lengths.max())
        x = np.zeros((len(lengths), longest, features.shape[1]), np.float32)
        y, share = np.zeros((2, len(lengths), longest), np.float32)
        for c, length in enumerate(lengths):
            rows = slice(offsets[c], offsets[c + 1])
            x[c, :length], y[c, :length], share[c, :length] = features[rows], targets[rows], 1 / length
        return cls(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(share), train)


def split(theta: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return weights and biases (m, ...) of the 3 -> 2 -> 1 network from vectors (m, 11)."""
    return theta[:, :6].reshape(-1, 2, 3), theta[:, 6:8], theta[:, 8:10], theta[:, 10]


def mean_squares(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the mean square error (m,) of vectors (m, 11), each on its own rows (m, rows, 3)."""
    w1, b1, w2, b2 = split(theta)
    hidden = torch.relu(torch.baddbmm(b1[:, None, :], x, w1.transpose(1, 2)))
    outputs = torch.einsum("mrh,mh->mr", hidden, w2) + b2[:, None]
    return ((outputs - y).square() * share).sum(1)


def losses(hypotheses: torch.Tensor, x: torch.Tensor, y: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the RMSE (k, m) of every hypothesis on every client's rows."""
    flat = x.reshape(-1, x.shape[2])
    w1, b1, w2, b2 = split(hypotheses)
    hidden = torch.relu(torch.einsum("rf,khf->krh", flat, w1) + b1[:, None, :])
    outputs = (torch.einsum("krh,kh->kr", hidden, w2) + b2[:, None]).reshape(len(hypotheses), *y.shape)
    return ((outputs - y).square() * share).sum(2).sqrt()


def kmeans(points: NDArray[np.float64], centroids: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return means and labels of Lloyd's iterations; an empty cluster keeps its centroid."""
    labels = None
    while True:
        following = np.square(points[:, None] - centroids[None]).sum(2).argmin(1)
        if labels is not None and np.array_equal(following, labels):
            return centroids, labels
        labels = following
        centroids = centroids.copy()
        for j in np.unique(labels):
            centroids[j] = points[labels == j].mean(0)


def initial(k: int) -> torch.Tensor:
    """Draw k vectors (k, 11) as PyTorch's linear layers do: uniform within 1 / sqrt(inputs)."""
    bounds = torch.cat([torch.full((8,), 3**-0.5), torch.full((3,), 2**-0.5)])
    return (torch.rand(k, 11) * 2 - 1) * bounds


def run(
    data: Data,
    k: int,
    nu: float,
    seed: int,
    step: float = 0.4,
    rounds: int = 500,
    patience: int = 30,
    users: int = 100,
    validators: int = 200,
    radius_floor: float = 0.01,
) -> tuple[float, NDArray[np.int64], int]:
    """Run Algorithm 1; return the lowest validation RMSE, participations (clients,), and the rounds it took."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    hypotheses = initial(k)
    spent = np.zeros(data.train, np.int64)
    best, stale = np.inf, 0
    for number in range(1, rounds + 1):
        clients = rng.choice(data.train, users, replace=False)
        asked = torch.from_numpy(clients)
        x, y, share = data.features[asked], data.targets[asked], data.share[asked]
        with torch.no_grad():
            chosen = losses(hypotheses, x, y, share).argmin(0)
        start = hypotheses[chosen]
        theta = start.clone().requires_grad_()
        (mean_squares(theta, x, y, share) + TINY).sqrt().sum().backward()
        update = (-step * theta.grad).double().numpy()
        n = update.shape[1]
        if nu:
            radius = np.maximum(np.linalg.norm(update, axis=1, keepdims=True), radius_floor)
            scale = nu * radius / n
            update += scale * np.sqrt(2 * rng.standard_gamma((n + 1) / 2, (users, 1))) * rng.standard_normal((users, n))
        released = start.double().numpy() + update
        spent[clients] += 1

        validating = torch.from_numpy(data.train + rng.choice(len(data.targets) - data.train, validators, replace=False))
        with torch.no_grad():
            own = losses(hypotheses, data.features[validating], data.targets[validating], data.share[validating])
        loss = float(own.min(0).values.mean())
        best, stale = (loss, 0) if loss < best else (best, stale + 1)
        if stale >= patience:
            break
        means, _ = kmeans(released, hypotheses.double().numpy())
        hypotheses = torch.from_numpy(means).float()
    return best, spent, number
