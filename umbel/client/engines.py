"""The operations of an engine, and the order in memory in which a network computes fastest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from umbel.client.cohort import Cohort, Schedule
from umbel.models.fit import look
from umbel.models.model import Model, Parameters

ONE_THREAD_BYTES = 1 << 22
"""Up to here a single thread computes a chunk: on a busy machine, threads wait far longer than that takes."""

Chain = list[tuple[str, nn.Module]]
"""The layers of a plain chain of dense layers and activations, each with the prefix of its parameters' names."""


class Engine(ABC):
    r"""Computes some clients of a model on a device, from tensors to tensors.

    Hypotheses are (k, \*shape) each. Local parameters, and what clients have trained, are (clients, \*shape) each.

    Attributes
    ----------
    exact : bool
        Whether a client's numbers depend on no other client, bit for bit, also if several are computed together.
    """

    exact = False

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device = model, device
        self.frozen = {name: value.detach().to(device) for name, value in model.frozen_values.items()}
        self.decays = {
            name: torch.from_numpy(value).to(device)
            for name, value in model.decays.items()
            if name in model.local_shapes
        }

    @property
    def chain(self) -> Chain | None:
        """The layers whose products stack the clients in DP-SGD; None to compute each client alone."""
        return None

    def apply(self, parameters: Parameters, inputs: Tensor, training: bool = False) -> Tensor:
        """Return one network's outputs; see `Model.apply`."""
        return self.model.apply(self.frozen | parameters, inputs, training)

    @abstractmethod
    def sums(self, hypotheses: Parameters, cohort: Cohort, local: Parameters) -> Tensor:
        """Return the summed loss and metric of every hypothesis over each client's rows, (2, k, clients) in 64 bits.

        If both sum the same numbers, the shape may be (1, k, clients).
        """

    @abstractmethod
    def outputs(self, parameters: Parameters, cohort: Cohort) -> Tensor:
        r"""Return outputs (rows, \*output shape) where each client has a network, (clients, \*shape)."""

    @abstractmethod
    def descend(self, start: Parameters, cohort: Cohort, schedule: Schedule, names: frozenset[str]) -> Parameters:
        r"""Train the named parameters of all clients, each (clients, \*shape), and return all; `start` may change."""


@lru_cache(maxsize=16)
def arrangement(model: Model, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Return a function that arranges parameters in memory: channels last for convolutions, if the model allows it.

    CPUs then compute pooling and convolutions much faster. Later layers inherit the order, and a module that needs a
    view in the usual order fails: its parameters stay as they are.
    """
    try:
        with torch.inference_mode():
            parameters = {name: _channels_last(value) for name, value in model.module.named_parameters()}
            zeros = torch.zeros(2, *shape)
            model.apply(parameters, zeros.long() if look(model, shape).tokens else zeros)
    except RuntimeError:
        return lambda value: value
    return _channels_last


def _channels_last(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.channels_last) if value.ndim == 4 else value


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Have PyTorch compute attention in single steps: vmap takes fused ones apart, one client after the other."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
