"""The tasks as one would write them without a framework: PyTorch and numpy, all in memory.

The yardstick for what umbel adds to them: messages, gate, ledger, strategy.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from benchmarks.peers.brief import TINY, Brief
from benchmarks.peers.networks import network

Theta = dict[str, Tensor]
"""Parameters of m models, each (m, \\*shape)."""
Vectors = NDArray[np.float64]
"""The same as vectors (m, n)."""

CLIP_NORM_FLOOR = 0.01
_ALGORITHM = Path(__file__).resolve().parents[1] / "examples" / "algorithm.py"


class Loop(Protocol):
    """How a task's clients compute."""

    def losses(self, hypotheses: Theta, clients: Sequence[int]) -> NDArray[np.float32]:
        """Return the loss of each of k hypotheses on the rows of each client, (k, clients)."""

    def train(self, hypotheses: Theta, clients: Sequence[int]) -> tuple[Vectors, Vectors]:
        """Return the hypothesis that each client chooses, and its model after training."""


class Hospital:
    """Clients of few rows, all at once by `torch.func`, which takes any network; one full batch."""

    def __init__(self, brief: Brief) -> None:
        real = np.arange(brief.lengths.max()) < brief.lengths[:, None]
        x, y = np.zeros((*real.shape, brief.features.shape[1]), np.float32), np.zeros(real.shape, np.float32)
        x[real], y[real] = brief.features, brief.targets.ravel()
        share = (real / brief.lengths[:, None]).astype(np.float32)  # of a row in its client's mean; 0 for padding
        self._data = [torch.from_numpy(one) for one in (x, y, share)]
        self._step, net = brief.settings.step_size, network(brief)

        def rmse(theta: Theta, x: Tensor, y: Tensor, share: Tensor) -> Tensor:
            outputs = functional_call(net, theta, (x,)).squeeze(-1)
            mean: Tensor = ((outputs - y).square() * share).sum()
            return (mean + TINY).sqrt()

        self._losses = vmap(vmap(rmse, in_dims=(None, 0, 0, 0)), in_dims=(0, None, None, None))
        self._gradients = vmap(grad(rmse))

    def losses(self, hypotheses: Theta, clients: Sequence[int]) -> NDArray[np.float32]:
        """Return the root mean square errors."""
        with torch.no_grad():
            found: NDArray[np.float32] = self._losses(hypotheses, *self._part(clients)).numpy()
        return found

    def train(self, hypotheses: Theta, clients: Sequence[int]) -> tuple[Vectors, Vectors]:
        """Make one step."""
        own = self._part(clients)
        with torch.no_grad():
            chosen = self._losses(hypotheses, *own).argmin(0)
        start = {name: value[chosen] for name, value in hypotheses.items()}
        before = flatten(start)
        return before, before - self._step * flatten(self._gradients(start, *own))

    def _part(self, clients: Sequence[int]) -> list[Tensor]:
        index = torch.from_numpy(np.array(clients))
        return [one[index] for one in self._data]


class CNN:
    """Writers of images, one after the other: on a CPU convolutions of many clients at once are slower."""

    def __init__(self, brief: Brief, layout: torch.memory_format = torch.contiguous_format) -> None:
        self._brief, self._net, self._rng, self._layout = brief, network(brief), np.random.default_rng(0), layout

    def losses(self, hypotheses: Theta, clients: Sequence[int]) -> NDArray[np.float32]:
        """Return the cross-entropies."""
        with torch.inference_mode():
            models = [self._laid_out(model) for model in each(hypotheses)]
            losses = [[float(self._loss(model, *self._rows(c))) for c in clients] for model in models]
        return np.array(losses, np.float32)

    def train(self, hypotheses: Theta, clients: Sequence[int]) -> tuple[Vectors, Vectors]:
        """Do minibatch SGD, each epoch in a separate order."""
        settings, trained = self._brief.settings, []
        chosen = self.losses(hypotheses, clients).argmin(0)
        start = {name: value[chosen] for name, value in hypotheses.items()}
        for client, model in zip(clients, each(start), strict=True):
            theta, (x, y) = self._laid_out(model), self._rows(client)
            for _ in range(settings.local_epochs):
                for batch in torch.from_numpy(self._rng.permutation(len(y))).split(settings.batch_size or len(y)):
                    theta = {name: value.detach().requires_grad_() for name, value in theta.items()}
                    gradients = torch.autograd.grad(self._loss(theta, x[batch], y[batch]), list(theta.values()))
                    with torch.no_grad():
                        moved = zip(theta.items(), gradients, strict=True)
                        theta = {name: value - settings.step_size * gradient for (name, value), gradient in moved}
            trained.append(flatten({name: value[None] for name, value in theta.items()}))
        return flatten(start), np.concatenate(trained)

    def _rows(self, client: int) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, self._brief.client(client)))

    def _laid_out(self, theta: Theta) -> Theta:
        return {
            name: value.contiguous(memory_format=self._layout) if value.ndim == 4 else value
            for name, value in theta.items()
        }

    def _loss(self, theta: Theta, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(self._net, theta, (x,)), y)


LOOPS: dict[str, type[Hospital | CNN]] = {"hospital": Hospital, "cnn": CNN}


def play(loop: Loop, brief: Brief, nu: float) -> list[float]:
    """Play a task from its initial hypotheses; return the validation loss after 0, 1, 2, ... rounds."""
    settings, rng = brief.settings, np.random.default_rng(0)
    hypotheses = {name: torch.from_numpy(value) for name, value in brief.hypotheses.items()}
    history = []
    for clients, judges in zip([*settings.train, None], settings.validate, strict=True):
        history.append(float(loop.losses(hypotheses, judges).min(0).mean()))
        if clients is not None:
            releases = released(*loop.train(hypotheses, clients), nu, rng)
            _, centroids = kmeans(releases, flatten(hypotheses))
            hypotheses = unflatten(centroids, hypotheses)
    return history


def released(start: Vectors, trained: Vectors, nu: float, rng: np.random.Generator) -> Vectors:
    """Return trained models with Laplace noise in proportion to the norms of their updates."""
    if not nu:
        return trained
    m, n = trained.shape
    radius = np.maximum(np.linalg.norm(trained - start, axis=1, keepdims=True), CLIP_NORM_FLOOR)
    mixing = np.sqrt(2 * rng.standard_gamma((n + 1) / 2, (m, 1)))
    found: Vectors = trained + nu * radius / n * mixing * rng.standard_normal((m, n))
    return found


def kmeans(points: Vectors, centroids: Vectors) -> tuple[NDArray[np.int64], Vectors]:
    """Return the labels and means of Lloyd's iterations; an empty cluster keeps its centroid."""
    labels = np.full(len(points), -1)
    while True:
        following = np.square(points[:, None] - centroids[None]).sum(2).argmin(1)
        if np.array_equal(following, labels):
            return labels, centroids
        labels, centroids = following, centroids.copy()
        for j in np.unique(labels):
            centroids[j] = points[labels == j].mean(0)


def each(theta: Theta) -> list[Theta]:
    """Return the parameters of each model by itself."""
    return [dict(zip(theta, values, strict=True)) for values in zip(*theta.values(), strict=True)]


def flatten(theta: Theta) -> Vectors:
    """Return stacked parameters as vectors."""
    return np.concatenate([value.flatten(1).numpy() for value in theta.values()], 1, dtype=np.float64)


def unflatten(vectors: Vectors, like: Theta) -> Theta:
    """Return vectors as stacked parameters."""
    parts = torch.from_numpy(vectors).float().split([value.numel() // len(value) for value in like.values()], dim=1)
    return {name: part.reshape(-1, *value.shape[1:]) for (name, value), part in zip(like.items(), parts, strict=True)}


@lru_cache(maxsize=1)
def algorithm() -> SimpleNamespace:
    """Return the names of the example. It is a script, so no package holds it."""
    return SimpleNamespace(**runpy.run_path(str(_ALGORITHM)))


def cost(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the cost of the network 3 -> 2 -> 1 with ReLU on a client's rows (Eq. 10 and Sec. 5.2)."""
    weight, bias, outer, constant = theta.split([6, 2, 2, 1])
    outputs = torch.relu(torch.addmm(bias, x, weight.view(2, 3).T)) @ outer + constant
    mean: Tensor = (outputs - y).square().mean()
    return (mean + TINY).sqrt()


def by_client(brief: Brief, nu: float) -> list[float]:
    """Do what `play` does of the hospital task by `examples/algorithm.py`, Algorithm 1 as the paper states it.

    It shows what computing the clients one by one costs.
    """
    settings, draws = brief.settings, np.random.default_rng(0)
    clients = [brief.client(c) for c in range(len(brief.lengths))]
    Z = [(torch.from_numpy(x), torch.from_numpy(y).flatten()) for x, y in clients]
    theta = np.concatenate([value.reshape(brief.k, -1) for value in brief.hypotheses.values()], 1, dtype=np.float64)

    def streams(purpose: str, t: int, c: int) -> Any:
        # In place of the generator of a round's sample, so that the clients are those that umbel draws.
        asked = SimpleNamespace(choice=lambda *_, **__: np.array(settings.train[t]))
        return asked if purpose == "sample" else draws

    rounds = algorithm().algorithm_1(
        theta, Z, cost, streams, T=brief.rounds, U=len(settings.train[0]), E=settings.local_epochs,
        s=settings.step_size, B_s=settings.batch_size, nu=nu,
    )  # fmt: skip
    models = [theta, *(theta for theta, _, _ in rounds)]
    return [
        float(np.mean([min(algorithm().costs(theta, Z[c], cost)) for c in judges]))
        for theta, judges in zip(models, settings.validate, strict=True)
    ]
