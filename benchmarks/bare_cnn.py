"""Images by writer, as one would learn them without a framework: PyTorch and numpy, all in memory.

A client after the other: on a CPU convolutions of many clients at once are slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from benchmarks.bare_hospital import kmeans
from benchmarks.peers.brief import Brief
from benchmarks.peers.networks import network

Parameters = dict[str, Tensor]


def play(brief: Brief, orders: Sequence[Sequence[NDArray[np.int64]]], nu: float) -> list[float]:
    """Play a task from its initial hypotheses; return the validation loss of each round and after the last.

    Parameters
    ----------
    brief : Brief
    orders : sequence, one a round, of sequences, one a client, of ndarray (epochs, rows)
        How each client goes through its rows.
    nu : float
        Noise multiplier, of the noise of a whole vector.
    """
    settings, module = brief.settings, network(brief)
    rng = np.random.default_rng(0)
    hypotheses = [
        {name: torch.from_numpy(value[j]) for name, value in brief.hypotheses.items()} for j in range(brief.k)
    ]
    history = []
    for clients, judges, order in zip(settings.train, settings.validate, orders, strict=False):
        released = []
        for client, own in zip(clients, order, strict=True):
            x, y = (torch.from_numpy(value) for value in brief.client(client))
            start = hypotheses[int(np.argmin(losses(module, hypotheses, x, y)))]
            trained = train(module, start, x, y, own, settings.batch_size, settings.step_size)
            released.append(noised(flatten(start), flatten(trained), nu, rng))
        history.append(validate(module, hypotheses, brief, judges))
        centroids = kmeans(np.stack(released), np.stack([flatten(theta) for theta in hypotheses]))
        hypotheses = [unflatten(centroid, hypotheses[0]) for centroid in centroids]
    return [*history, validate(module, hypotheses, brief, settings.validate[-1])]


def losses(module: torch.nn.Module, hypotheses: Sequence[Parameters], x: Tensor, y: Tensor) -> list[float]:
    """Return the loss of each hypothesis on a client's rows."""
    with torch.inference_mode():
        return [float(cross_entropy(functional_call(module, theta, (x,)), y)) for theta in hypotheses]


def train(
    module: torch.nn.Module,
    theta: Parameters,
    x: Tensor,
    y: Tensor,
    order: NDArray[np.int64],
    batch_size: int,
    step: float,
) -> Parameters:
    """Do minibatch SGD."""
    for epoch in torch.from_numpy(order):
        for batch in epoch.split(batch_size):
            theta = {name: value.detach().requires_grad_() for name, value in theta.items()}
            loss = cross_entropy(functional_call(module, theta, (x[batch],)), y[batch])
            gradients = torch.autograd.grad(loss, list(theta.values()))
            with torch.no_grad():
                theta = {n: v - step * g for (n, v), g in zip(theta.items(), gradients, strict=True)}
    return {name: value.detach() for name, value in theta.items()}


def noised(
    start: NDArray[np.float64], trained: NDArray[np.float64], nu: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return a client's model with noise in proportion to its update."""
    if not nu:
        return trained
    n, radius = len(start), max(float(np.linalg.norm(trained - start)), 0.01)
    rho: NDArray[np.float64] = np.sqrt(2 * rng.standard_gamma((n + 1) / 2)) * rng.standard_normal(n)
    return trained + nu * radius / n * rho


def validate(module: torch.nn.Module, hypotheses: Sequence[Parameters], brief: Brief, clients: Sequence[int]) -> float:
    """Return the mean loss of clients under their best hypothesis."""
    rows = ([torch.from_numpy(value) for value in brief.client(client)] for client in clients)
    return float(np.mean([min(losses(module, hypotheses, x, y)) for x, y in rows]))


def flatten(theta: Parameters) -> NDArray[np.float64]:
    """Return parameters as a vector (n,)."""
    vector: NDArray[np.float64] = torch.cat([value.flatten() for value in theta.values()]).double().numpy()
    return vector


def unflatten(vector: NDArray[np.float64], like: Parameters) -> Parameters:
    """Return a vector (n,) as parameters."""
    parts = torch.from_numpy(vector).float().split([value.numel() for value in like.values()])
    return {name: part.reshape(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}
