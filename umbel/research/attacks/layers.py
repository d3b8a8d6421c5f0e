"""The fully connected layers of a network, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from umbel.models.model import Model, Parameters
from umbel.protocol.errors import NotApplicableError


@contextmanager
def inputs_of_layers(model: Model) -> Iterator[dict[str, Tensor]]:
    """Give a dict in which each forward pass leaves what goes into each ``nn.Linear``, by its name, as they run."""
    seen: dict[str, Tensor] = {}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] = inputs[0]

        return hook

    layers = [(name, layer) for name, layer in model.module.named_modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(record(name)) for name, layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def dense_layers(model: Model, parameters: Parameters, shape: tuple[int, ...]) -> list[str]:
    """Return the names of the fully connected layers in the order in which they run on one image of `shape`.

    Raises
    ------
    NotApplicableError
        When there is none, or one of them sees more than one vector for an image.
    """
    with inputs_of_layers(model) as seen, torch.no_grad():
        model.apply(parameters, torch.zeros(1, *shape, dtype=next(iter(parameters.values())).dtype))
    if not seen:
        raise NotApplicableError(f"model {model.name!r} has no fully connected layer (torch.nn.Linear)")
    for name, inputs in seen.items():
        if inputs.numel() != inputs.shape[-1]:
            raise NotApplicableError(
                f"layer {name!r} of model {model.name!r} sees {inputs.numel() // inputs.shape[-1]} vectors an image, "
                "so its gradient is not of rank one"
            )
    return list(seen)


def parameter(name: str, kind: str) -> str:
    """Return the name in the state dict of a layer's ``weight`` or ``bias``; a network may be one layer itself."""
    return f"{name}.{kind}" if name else kind
