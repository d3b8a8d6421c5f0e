"""A model: a network with its loss and its metric, and which of its parameters travel.

Three kinds of parameters. *Frozen* ones are part of the model: never trained, never sent; both sides
compare a digest of them. *Shared* ones are what a hypothesis is, what a release is, and what n counts.
*Local* ones are each client's own: trained, and never leaving its node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from models.losses import Loss, Score
from protocol.errors import ModelError

Parameters = dict[str, Tensor]
Arrays = dict[str, NDArray[Any]]

_FROZEN_SEED = 0  # of parameters that nobody trains and nobody sends


class Kind(StrEnum):
    """What becomes of a parameter."""

    FROZEN = "frozen"
    SHARED = "shared"
    LOCAL = "local"


@dataclass(frozen=True)
class Model:
    """A network with its loss and metric.

    A network may say more of itself, in attributes of its class: ``local_parameters``, patterns on
    the names of those that are each client's own; ``summed_parameters``, those whose step goes down
    the sum over a minibatch instead of its mean (PAC paper, Protocol 1); ``draw_local(generator)``,
    which returns a fresh client's own parameters by name; ``fit_local(...)``, see
    `models.factors.Factors.fit_local`; ``misfit(federation)``, see `models.fit.misfit`. A parameter
    with ``requires_grad=False`` is frozen.

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
    frozen, local : tuple of str
        Patterns on names, as ``backbone.*``, of parameters to be frozen or local besides those that
        the network makes so itself. A parameter that the network makes local stays so.
    """

    name: str
    network: Callable[[], nn.Module]
    loss: Loss
    metric: Score
    frozen: tuple[str, ...] = ()
    local: tuple[str, ...] = ()

    @cached_property
    def module(self) -> nn.Module:
        """The network whose forward pass is used; of its parameters only the frozen ones are."""
        return self._build(_FROZEN_SEED)

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """The kind of each parameter, by its name in the state dict."""
        own = tuple(getattr(self.module, "local_parameters", ()))
        trained = {name: value.requires_grad for name, value in self.module.named_parameters(remove_duplicate=False)}
        kinds = {}
        for name in self.module.state_dict():
            if _matches(name, own):
                kinds[name] = Kind.LOCAL
            elif not trained.get(name, True) or _matches(name, self.frozen):
                kinds[name] = Kind.FROZEN
            else:
                kinds[name] = Kind.LOCAL if _matches(name, self.local) else Kind.SHARED
        return kinds

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each shared parameter."""
        return self._shapes(Kind.SHARED)

    @cached_property
    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each local parameter; empty for a model that has none."""
        return self._shapes(Kind.LOCAL)

    @cached_property
    def frozen_values(self) -> Parameters:
        """The frozen parameters; empty for a model that has none."""
        state = self.module.state_dict()
        return {name: state[name] for name, kind in self.kinds.items() if kind is Kind.FROZEN}

    @cached_property
    def frozen_digest(self) -> str:
        """SHA-256 of the frozen parameters and their names; empty if there are none."""
        digest = hashlib.sha256()
        for name, value in self.frozen_values.items():
            digest.update(f"{name} {tuple(value.shape)} ".encode())
            digest.update(value.detach().contiguous().numpy().tobytes())
        return digest.hexdigest() if self.frozen_values else ""

    @cached_property
    def summed(self) -> frozenset[str]:
        """Parameters whose step goes down the sum over a minibatch instead of its mean."""
        return frozenset(getattr(self.module, "summed_parameters", ()))

    @cached_property
    def num_parameters(self) -> int:
        """Number of shared parameters, the papers' n."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def apply(self, parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return the outputs ``(batch, o)`` of the network with the given parameters; frozen ones may be left out."""
        outputs: Tensor = functional_call(self.module, dict(parameters), (inputs,))
        return outputs

    def initial(self, seed: int) -> Arrays:
        """Draw fresh shared parameters."""
        return self._values(self._build(seed), Kind.SHARED)

    def initial_local(self, generators: Sequence[np.random.Generator]) -> Arrays:
        """Draw fresh local parameters, each (clients, \\*shape), from a generator a client."""
        draw = getattr(self.module, "draw_local", None) or self._draw_local
        drawn = [draw(generators[i]) for i in range(len(generators))]
        return {
            name: np.stack([one[name] for one in drawn]).astype(np.float32)
            if drawn
            else np.zeros((0, *shape), np.float32)
            for name, shape in self.local_shapes.items()
        }

    def _draw_local(self, generator: np.random.Generator) -> Arrays:
        return self._values(self._build(int(generator.integers(2**63))), Kind.LOCAL)

    def _build(self, seed: int) -> nn.Module:
        """Build the network. PyTorch's initialisers read the global generator alone: it is put back afterwards."""
        with torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` seeds accelerators as well, and where none is in use yet keeps a trace of each call.
            torch.default_generator.manual_seed(seed)
            return self.network()

    def _shapes(self, kind: Kind) -> dict[str, tuple[int, ...]]:
        state = self.module.state_dict()
        return {name: tuple(state[name].shape) for name, own in self.kinds.items() if own is kind}

    def _values(self, network: nn.Module, kind: Kind) -> Arrays:
        state = network.state_dict()
        return {name: state[name].detach().numpy().copy() for name, own in self.kinds.items() if own is kind}


def check(model: Model) -> None:
    """Raise `ModelError` for a network that umbel cannot train; the text names the layer or parameter and the fix."""
    module, name = model.module, model.name
    if buffers := [buffer for buffer, _ in module.named_buffers()]:
        raise ModelError(
            f"model {name!r} has buffers {buffers}; use layers without running statistics, "
            "as GroupNorm instead of BatchNorm"
        )
    state = module.state_dict()
    if not state:
        raise ModelError(f"model {name!r} has no parameters")
    if odd := [key for key, value in state.items() if not value.is_floating_point()]:
        raise ModelError(f"model {name!r} has parameters that are not floating point: {odd}")
    if odd := [key for key, value in state.items() if value.dtype != torch.float32]:
        raise ModelError(f"model {name!r} has parameters that are not float32: {odd}")
    dropout = nn.modules.dropout._DropoutNd
    if odd := [key for key, layer in module.named_modules() if isinstance(layer, dropout) and layer.p > 0]:
        raise ModelError(f"model {name!r} has layers that drop out at random: {odd}; leave them out")
    for kind, patterns in (("frozen", model.frozen), ("local", model.local)):
        if idle := [pattern for pattern in patterns if not any(fnmatchcase(key, pattern) for key in state)]:
            raise ModelError(f"{kind} = {idle[0]!r} matches no parameter of model {name!r}; it has {', '.join(state)}")
    if both := [key for key in state if _matches(key, model.frozen) and _matches(key, model.local)]:
        raise ModelError(f"parameters {both} of model {name!r} are asked for as frozen and as local; choose one")
    if not model.shapes:
        raise ModelError(
            f"model {name!r} has no shared parameters left, and nothing would be learnt together; "
            f"let frozen and local match fewer of {', '.join(state)}"
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
