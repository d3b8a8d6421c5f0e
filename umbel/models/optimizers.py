"""Local optimisation at a client: an optimizer of ``torch.optim`` by name, clipping, a proximal term."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from umbel.protocol.errors import ConfigError
from umbel.protocol.options import parse_options

Share = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Descent:
    """The step that a client computes from a gradient.

    Attributes
    ----------
    clip_gradient : float
        Maximum gradient norm, over all trained parameters of a client; 0 for no limit.
    proximal : float
        mu of FedProx (Li et al., MLSys 2020, Eq. 2): it adds ``mu/2 |w - w_0|**2`` to the loss, where w_0 are the
        shared parameters at the start of the client's round.
    """

    clip_gradient: NotNegative = 0.0
    proximal: NotNegative = 0.0

    @property
    def plain(self) -> bool:
        """Whether a step is just ``w - s g``."""
        return self == PLAIN

    def make(self, parameters: Iterable[Tensor], step_size: float) -> torch.optim.Optimizer:
        """Return the optimizer of some parameters, with an empty state."""
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(Descent):
    """Options of ``torch.optim.SGD``."""

    momentum: Share = 0.0
    nesterov: bool = False
    weight_decay: NotNegative = 0.0

    def make(self, parameters: Iterable[Tensor], step_size: float) -> torch.optim.Optimizer:
        """See `Descent.make`."""
        # foreach steps all clients' parameters at once where that is faster; the numbers are the same.
        return torch.optim.SGD(
            parameters, step_size, self.momentum, 0.0, self.weight_decay, self.nesterov, foreach=True
        )


@dataclass(frozen=True)
class Momentum(SGD):
    """SGD with the usual momentum."""

    momentum: Share = 0.9


@dataclass(frozen=True)
class Adam(Descent):
    """Options of ``torch.optim.Adam``."""

    beta1: Share = 0.9
    beta2: Share = 0.999
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    weight_decay: NotNegative = 0.0

    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.Adam

    def make(self, parameters: Iterable[Tensor], step_size: float) -> torch.optim.Optimizer:
        """See `Descent.make`."""
        betas = self.beta1, self.beta2
        return self.kind(parameters, step_size, betas, self.epsilon, self.weight_decay, foreach=True)


@dataclass(frozen=True)
class AdamW(Adam):
    """Options of ``torch.optim.AdamW``, which decouples weight decay from the gradient."""

    weight_decay: NotNegative = 0.01
    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.AdamW


OPTIMIZERS: dict[str, type[Descent]] = {"sgd": SGD, "momentum": Momentum, "adam": Adam, "adamw": AdamW}
"""Local optimizers by name, each with its options. A client's optimizer state is reset in each round."""
PLAIN = SGD()


@lru_cache(maxsize=16)
def descent_of(optimizer: str) -> Descent:
    """Return the optimizer of a run, as its key ``optimizer`` names it: ``momentum nesterov=true proximal=0.1``.

    Raises
    ------
    ConfigError
        If there is none of that name, or it has no such option.
    """
    name, _, options = optimizer.partition(" ")
    if name not in OPTIMIZERS:
        text = f"there is no optimizer {name!r}; choose from {', '.join(OPTIMIZERS)}"
        raise ConfigError(text, code="config.unknown-name")
    found = parse_options(OPTIMIZERS[name], options, "optimizer")
    if isinstance(found, SGD) and found.nesterov and not found.momentum:
        text = "optimizer: nesterov has no effect without momentum; set momentum, or leave nesterov out"
        raise ConfigError(text, code="config.option-value")
    return found
