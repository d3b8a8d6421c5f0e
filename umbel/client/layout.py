"""The order in memory in which a network computes fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from umbel.models.fit import look
from umbel.models.model import Model


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
        return _as_it_is
    return _channels_last


def _channels_last(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.channels_last) if value.ndim == 4 else value


def _as_it_is(value: Tensor) -> Tensor:
    return value


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
