"""A model: a network with its loss and its metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from models.factors import margin

# RMSE has no gradient at zero residual; far below any real mean square, this gives it one.
TINY = 1e-12

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Score:
    """A per-sample value and how its mean over a client's samples is reported.

    Attributes
    ----------
    name : str
        The name used in run config and reports.
    per_sample : callable
        ``(outputs (*batch, o), targets (*batch,) or (*batch, o)) -> (*batch,)``.
    report : callable
        Maps the mean over samples to the reported value, elementwise.
    higher_is_better : bool
    """

    name: str
    per_sample: Callable[[Tensor, Tensor], Tensor]
    report: Callable[[Tensor], Tensor]
    higher_is_better: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Loss(Score):
    """A score that a local step can descend.

    Attributes
    ----------
    objective : callable
        Maps the mean over a minibatch to what the step descends, elementwise.
    """

    objective: Callable[[Tensor], Tensor]


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return ``|output - target|**2`` a sample; classes count as one-hot vectors.

    Whole numbers are classes where there are several outputs and one target a sample.
    """
    if not targets.is_floating_point() and outputs.shape[-1] > 1 and targets.ndim < outputs.ndim:
        targets = nn.functional.one_hot(targets.long(), outputs.shape[-1])
    return (outputs - targets.reshape(outputs.shape)).square().sum(-1)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return ``-log softmax(output)[target]`` a sample."""
    return torch.logsumexp(outputs, -1) - outputs.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 where the largest output is the target class, 0 elsewhere."""
    return (outputs.argmax(-1) == targets).to(outputs.dtype)


def right_sign(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 where the score has the sign of the label, -1 or 1; 0 elsewhere."""
    return (margin(outputs, targets) > 0).to(outputs.dtype)


def _same(mean: Tensor) -> Tensor:
    return mean


def _rmse(mean: Tensor) -> Tensor:
    return (mean + TINY).sqrt()


LOSSES = {
    "mse": Loss("mse", squared_error, torch.sqrt, _same),
    "rmse": Loss("rmse", squared_error, torch.sqrt, _rmse),
    "cross-entropy": Loss("cross-entropy", cross_entropy, _same, _same),
    "log": Loss("log", lambda outputs, targets: nn.functional.softplus(-margin(outputs, targets)), _same, _same),
    "hinge": Loss("hinge", lambda outputs, targets: (1 - margin(outputs, targets)).relu(), _same, _same),
    "margin": Loss("margin", lambda outputs, targets: -margin(outputs, targets), _same, _same),
}
"""Losses by name. ``mse`` descends the mean square and reports its root, ``rmse`` descends the
root itself (group privacy paper, Eq. 10); both report RMSE. ``log``, ``hinge`` and ``margin`` are
of one score and a label of -1 or 1 (PAC paper, Sec. 3)."""

METRICS = {
    "rmse": Score("rmse", squared_error, torch.sqrt),
    "accuracy": Score("accuracy", correct, _same, higher_is_better=True),
    "right-sign": Score("right-sign", right_sign, _same, higher_is_better=True),
}


@dataclass(frozen=True)
class Model:
    """A network with its loss and metric.

    Attributes
    ----------
    name : str
        As given in run config.
    network : callable
        Builds the network, a ``torch.nn.Module`` with floating point parameters and no buffers.
    loss : Loss
        What a client descends and reports.
    metric : Score
        What a validation client reports beside the loss.
    local_size : int
        Number of parameters that each client has for itself and that never leave its node; 0 for
        a model that is shared whole.
    """

    name: str
    network: Callable[[], nn.Module]
    loss: Loss
    metric: Score
    local_size: int = 0

    @cached_property
    def module(self) -> nn.Module:
        """The network whose forward pass is used; its own parameters are not."""
        return self.network()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, by its name in the state dict."""
        return {name: tuple(value.shape) for name, value in self.module.state_dict().items()}

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters, the papers' n."""
        return sum(value.numel() for value in self.module.state_dict().values())

    def apply(self, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return the outputs ``(batch, o)`` of the network with the given parameters."""
        outputs: Tensor = functional_call(self.module, dict(parameters), (inputs,))
        return outputs

    def initial(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Draw fresh parameters.

        PyTorch's initialisers read the global generator alone, so it is seeded, and put back as
        it was afterwards.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            state = self.network().state_dict()
        return {name: value.detach().numpy().copy() for name, value in state.items()}
