"""Targets that are wrong in one way each. Most are `GaussianMod` but for one method."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message

from tests.helpers.defences.right import GaussianMod, Matrix, Update, Wrapper, entropy


def mod(why: str, **methods: Any) -> type[GaussianMod]:
    """Return `GaussianMod` with other methods."""
    return type("Wrong", (GaussianMod,), {"__doc__": why, "__module__": __name__, **methods})


noise, factor, finite = GaussianMod.noise, GaussianMod.factor, GaussianMod.finite

# --- by one method

GlobalGenerator = mod(
    "Noise from NumPy's global generator.",
    noise=lambda self, name, shape: np.random.normal(0, self.sigma, shape),  # noqa: NPY002
)
BareArray = mod("Biases get no noise.", noise=lambda self, name, shape: noise(self, name, shape) * (name != "b"))
NoNoise = mod("The update alone, clipped.", noise=lambda self, name, shape: np.zeros(shape))
LowBits = mod(
    "Noise and update are floats of 32 bits, and so is their sum.",
    noise=lambda self, name, shape: noise(self, name, shape).astype(np.float32),
    rounded=lambda self, values: values,
)
Unclipped = mod("The clip norm is not used.", factor=lambda self, norm: 1.0)
ClipFollowsData = mod(
    "The clip norm is a share of the update's own norm, if that is longer.",
    factor=lambda self, norm: max(self.clip_norm, norm / 20) / max(self.clip_norm, norm),
)
ZeroUpdate = mod("Clipping divides by the norm.", factor=lambda self, norm: min(1.0, self.clip_norm / norm))
NanOpens = mod(
    "Clipping takes a NaN for a short norm.",
    finite=lambda self, update: update,
    factor=lambda self, norm: min(1.0, self.clip_norm / norm) if norm else 1.0,
)
NanPasses = mod(
    "An update with NaN is scaled to 0, but for its NaN.",
    finite=lambda self, update: update,
    factor=lambda self, norm: factor(self, norm) if math.isfinite(norm) else 0.0,
)
RecordsPass = mod(
    "Losses pass as they are.", metrics=lambda self, found: {"train_loss": found["train_loss"], "num-examples": 1}
)
ScalarsPass = mod(
    "0-d arrays pass as they are.",
    shaped=lambda self, values, like: GaussianMod.shaped(self, values, like) if like.ndim else like,
)
ClipPerArray = mod(
    "Each array is clipped by itself.",
    private=lambda self, update: {name: GaussianMod.private(self, {name: update[name]})[name] for name in update},
)

# --- by what they promise or keep


class TooLittleNoise(GaussianMod):
    """Two updates are two clip norms apart; this Mod counts on one fourth of that."""

    def distance(self) -> float:
        return 0.5

    def get_privacy_spent(self) -> Any:
        found = super().get_privacy_spent()
        found.epsilon = self.epsilon
        return found


class NoComposition(GaussianMod):
    """Noise for one release, and any number of releases."""

    get_privacy_spent = None  # type: ignore[assignment]

    def __init__(self, epsilon: float = 20.0) -> None:
        super().__init__(epsilon, rounds=1)

    def count(self) -> None:
        """Count nothing."""


class PureClaim(GaussianMod):
    """Gaussian noise, and a claim without a delta."""

    get_privacy_spent = None  # type: ignore[assignment]

    def __init__(self, epsilon: float = 20.0, delta: float = 1e-5) -> None:
        super().__init__(epsilon, delta)
        self.delta = 0.0


class Seeded(GaussianMod):
    """Each client's generator starts with the same seed."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(7)


class SharedNoise(GaussianMod):
    """All arrays get the beginning of the same draw."""

    def private(self, update: Update) -> Update:
        self._drawn = self.generator.normal(0, self.sigma, 100)
        return super().private(update)

    def noise(self, name: str, shape: tuple[int, ...]) -> Matrix:
        found: Matrix = self._drawn[: math.prod(shape)].reshape(shape)
        return found


class NoiseFollowsData(GaussianMod):
    """The noise grows with the update."""

    def factor(self, norm: float) -> float:
        self._norm = norm
        return super().factor(norm)

    def noise(self, name: str, shape: tuple[int, ...]) -> Matrix:
        return super().noise(name, shape) * max(1.0, self._norm / 100)


class IntegersPass(GaussianMod):
    """Integer arrays pass as they are."""

    def finite(self, update: Update) -> Update:
        self._whole = {name: value for name, value in update.items() if value.dtype == np.int64}
        return super().finite({name: value for name, value in update.items() if name not in self._whole})

    def private(self, update: Update) -> Update:
        return super().private(update) | self._whole


class ZeroEpsilon(GaussianMod):
    """An epsilon of 0 switches the noise off."""

    def __init__(self, epsilon: float = 20.0) -> None:
        super().__init__(epsilon or 20.0)
        if not epsilon:
            self.sigma = 2.0**-100


class ZeroDelta(GaussianMod):
    """A delta of 0 is divided by, at the first release."""

    def __init__(self, delta: float = 1e-5) -> None:
        super().__init__(delta=delta or 1e-5)
        self._given = delta

    def __call__(self, msg: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        assert math.log(1 / self._given)
        return super().__call__(msg, context, call_next)


class LargeDelta(GaussianMod):
    """A delta of one in a hundred."""

    def __init__(self) -> None:
        super().__init__(delta=0.01)


class WeightedWrapper(Wrapper):
    """Clients count as often as they say that they have rows."""

    def weight(self, reply: Message) -> float:
        return float(reply.content.metric_records["metrics"]["num-examples"])  # type: ignore[arg-type]


class OtherDeviation:
    """An optimizer with gradients of rows, as Opacus ships, that promises twice the noise that it draws."""

    noise_multiplier, max_grad_norm, loss_reduction, expected_batch_size = 1.0, 1.0, "sum", 4

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": []}]
        self._generator = entropy()

    def step(self) -> None:
        """Clip each row's gradients jointly, sum them, and add noise."""
        parameters = self.param_groups[0]["params"]
        rows = torch.cat([one.grad_sample.reshape(len(one.grad_sample), -1) for one in parameters], dim=1)
        norms = rows.norm(dim=1) if rows.isfinite().all() else torch.full((len(rows),), torch.inf)
        for one in parameters:
            total = torch.einsum("i,i...", 1 / norms.clamp(min=1.0), one.grad_sample.nan_to_num(0, 0, 0))
            drawn = self._generator.normal(0, self.noise_multiplier / 2, tuple(total.shape))
            one.grad = (((total + torch.from_numpy(np.asarray(drawn))) * 1024).round() / 1024).to(one.dtype)


FAULTS = {
    "TooLittleNoise": "too-little-noise", "NoComposition": "no-composition", "PureClaim": "no-pure-epsilon",
    "Seeded": "seeded-noise", "GlobalGenerator": "global-generator", "SharedNoise": "shared-noise",
    "BareArray": "bare-arrays", "ClipPerArray": "clip-per-array", "Unclipped": "unclipped",
    "ClipFollowsData": "clip-follows-data", "NoiseFollowsData": "clip-follows-data", "LowBits": "low-bits",
    "IntegersPass": "integers-pass", "RecordsPass": "records-pass", "ScalarsPass": "scalars-pass",
    "NanOpens": "nan-opens", "NanPasses": "nan-passes", "ZeroUpdate": "zero-update",
    "ZeroEpsilon(epsilon=20.0)": "zero-epsilon", "ZeroDelta(delta=1e-5)": "zero-delta",
    "LargeDelta": "delta-too-large", "NoNoise": "no-noise", "WeightedWrapper": "weights-from-data",
    "OtherDeviation": "other-deviation",
}  # fmt: skip
"""The fault of each, by the end of the target's name."""
