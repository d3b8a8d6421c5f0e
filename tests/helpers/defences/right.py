"""Six targets that keep what they claim: a Gaussian Mod with a budget, umbel's gate, a strategy wrapper, and functions
that add Laplace noise, flip signs, or send noise alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

import umbel
from umbel.privacy.accounting.accountant import compose
from umbel.privacy.mechanisms.gaussian import GaussianLoss, calibrate
from umbel.protocol.simulated import in_process

Matrix = NDArray[np.float64]
Update = dict[str, NDArray[Any]]


_calibrated = cache(calibrate)
seeds = np.random.default_rng()
"""Where the targets' generators get their seeds; tests put a generator with a seed here."""


def entropy() -> np.random.Generator:
    """A generator whose seed comes again in no other."""
    return np.random.default_rng(seeds.integers(2**63))


def arrays_of(record: ArrayRecord) -> Update:
    return {name: array.numpy() for name, array in record.items()}


def norm_of(update: Update) -> float:
    """The joint norm of all arrays."""
    return math.sqrt(sum(float(np.square(value, dtype=np.float64).sum()) for value in update.values()))


class GaussianMod:
    """A Mod with Gaussian noise that is (epsilon, delta)-private between any two updates, over all its releases."""

    def __init__(self, epsilon: float = 20.0, delta: float = 1e-5, clip_norm: float = 1.0, rounds: int = 2) -> None:
        self._check(epsilon, delta)
        self.epsilon, self.delta, self.clip_norm, self.left = epsilon, delta, clip_norm, rounds
        self.sigma = clip_norm * _calibrated(epsilon, delta, self.distance() * math.sqrt(rounds))
        self.generator = entropy()
        self.released = 0

    def get_privacy_spent(self) -> Any:
        """The target's own account."""
        loss = GaussianLoss(2 * self.clip_norm / self.sigma)
        return SimpleNamespace(epsilon=compose({loss: self.released}, self.delta), delta=self.delta)

    def __call__(self, msg: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        """Clip the update, add noise, and send nothing else."""
        self.count()
        reply = call_next(msg, context)
        received = arrays_of(msg.content.array_records["arrays"])
        trained = arrays_of(reply.content.array_records["arrays"])
        update = {name: np.atleast_1d(trained[name] - received[name]) for name in trained}
        private = self.private(self.finite(update))
        left = {name: received[name] + self.shaped(private[name], trained[name]) for name in trained}
        arrays = ArrayRecord({name: Array(np.asarray(value)) for name, value in left.items()})
        metrics = self.metrics(reply.content.metric_records["metrics"])
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)}), reply_to=msg)

    def _check(self, epsilon: float, delta: float) -> None:
        if not (epsilon > 0 and 0 < delta < 1):
            raise ValueError("epsilon and delta must be above 0")

    def distance(self) -> float:
        """Distance of any two clipped updates, in clip norms."""
        return 2.0

    def count(self) -> None:
        """Count one release, or refuse."""
        if self.left == 0:
            raise RuntimeError("the budget is spent")
        self.left, self.released = self.left - 1, self.released + 1

    def finite(self, update: Update) -> Update:
        """Replace an update that is not finite by 0."""
        if any(not np.issubdtype(value.dtype, np.floating) for value in update.values()):
            raise TypeError("integers take no noise")
        good = all(np.isfinite(value).all() for value in update.values())
        return update if good else {name: np.zeros_like(value) for name, value in update.items()}

    def private(self, update: Update) -> Update:
        """Clip jointly, and add noise."""
        factor = self.factor(norm_of(update))
        return {name: self.rounded(value * factor + self.noise(name, value.shape)) for name, value in update.items()}

    def factor(self, norm: float) -> float:
        """The factor that clips."""
        return 1 / max(1.0, norm / self.clip_norm)

    def noise(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """Noise of one array."""
        return self.generator.normal(0, self.sigma, shape)

    def rounded(self, values: Matrix) -> Matrix:
        """Round to a public grid, a power of two, so that the last bits tell nothing."""
        step = 2.0 ** math.floor(math.log2(self.sigma / 1000))
        found: Matrix = np.rint(values / step) * step
        return found

    def shaped(self, values: Matrix, like: NDArray[Any]) -> NDArray[Any]:
        """Values with the shape and type of an array."""
        return values.reshape(like.shape).astype(like.dtype)

    def metrics(self, found: MetricRecord) -> dict[str, Any]:
        """What to send beside the arrays: the same weight for all."""
        return {"num-examples": 1}


def gate() -> Any:
    """umbel's own gate, as in a simulation."""
    found = umbel.Gate(noise_multiplier=8.0, clip_norm=1.0, mechanism="gaussian", budget=2.0, delta=1e-5)

    def mod(msg: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        with in_process():
            return found(msg, context, call_next)

    mod.epsilon, mod.delta, mod.clip_norm = 2.0, 1e-5, 1.0  # type: ignore[attr-defined]
    return mod


class Wrapper:
    """A strategy wrapper that clips, weights clients alike, and adds noise to their mean."""

    def __init__(self, strategy: FedAvg, clipping_norm: float = 1.0, num_sampled_clients: int = 2) -> None:
        self.inner, self.clipping_norm, self.num_sampled_clients = strategy, clipping_norm, num_sampled_clients
        # One round costs epsilon 20, since the mean moves by two clip norms over the number of clients.
        self._mod = GaussianMod(20.0, 1e-5, clipping_norm / num_sampled_clients, rounds=1)
        self._rounds = 0

    def get_privacy_spent(self) -> Any:
        """The target's own account."""
        loss = GaussianLoss(2 * self._mod.clip_norm / self._mod.sigma)
        return SimpleNamespace(epsilon=compose({loss: self._rounds}, 1e-5), delta=1e-5)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Any:
        """As the wrapped strategy."""
        self._received = arrays
        return self.inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: list[Message]) -> tuple[ArrayRecord, None]:
        """Clip each update, and add noise to the mean of all."""
        self._rounds += 1
        received = arrays_of(self._received)
        total: Update = {name: np.zeros(np.atleast_1d(value).shape) for name, value in received.items()}
        for reply in replies:
            trained = arrays_of(reply.content.array_records["arrays"])
            update = self._mod.finite({name: np.atleast_1d(trained[name] - received[name]) for name in trained})
            for name, value in update.items():
                total[name] += self.weight(reply) * value / max(1.0, norm_of(update) / self.clipping_norm)
        left, weights = {}, sum(map(self.weight, replies))
        for name, value in total.items():
            noisy = self._mod.rounded(value / weights + self._mod.noise(name, value.shape))
            left[name] = Array(np.asarray(self._mod.shaped(noisy, received[name])))
        return ArrayRecord(left), None

    def weight(self, reply: Message) -> float:
        """The weight of a client: the same for all."""
        return 1.0


class LaplaceFunction:
    """Laplace noise on each value of a flat update, which is clipped to a box: a pure epsilon."""

    def __init__(self, epsilon: float = 2.0, gamma: float = 0.5) -> None:
        if not epsilon > 0:
            raise ValueError("epsilon must be above 0")
        self.epsilon, self.gamma, self.released = epsilon, gamma, 0
        self._generator = entropy()

    def get_privacy_spent(self) -> float:
        """The target's own account."""
        return self.epsilon * self.released

    def __call__(self, update: NDArray[Any]) -> NDArray[Any]:
        """Return a release."""
        self.released += 1
        update = update if np.isfinite(update).all() else np.zeros_like(update)
        scale = 2 * self.gamma * update.size / self.epsilon
        noisy = np.clip(update, -self.gamma, self.gamma) + self._generator.laplace(0, scale, update.shape)
        step = 2.0 ** math.floor(math.log2(scale / 1000))
        return np.asarray(np.rint(noisy / step) * step)


class SignFunction:
    """The sign of the sum of an update, flipped by randomised response: its pure epsilon is exact."""

    epsilon = 1.5

    def __init__(self) -> None:
        self._released = 0
        self._generator = entropy()

    def get_privacy_spent(self) -> float:
        """The target's own account."""
        return self.epsilon * self._released

    def __call__(self, update: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return one sign in place of all values."""
        self._released += 1
        total = sum(float(np.nan_to_num(value).sum()) for value in update.values())
        keep = self._generator.random() < 1 / (1 + math.exp(-self.epsilon))
        sign = 1.0 if (total > 0) == keep else -1.0
        return {name: np.full_like(value, sign) for name, value in update.items()}


class NoiseAlone:
    """Noise and no update: epsilon 0."""

    epsilon = 0.0

    def __init__(self) -> None:
        self._generator = entropy()

    def __call__(self, update: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return noise."""
        return [np.rint(1000 * self._generator.standard_normal(value.shape)) for value in update]


TARGETS = ("GaussianMod", "gate()", "Wrapper", "LaplaceFunction", "SignFunction", "NoiseAlone")
"""All of them, as the end of a target's name."""
