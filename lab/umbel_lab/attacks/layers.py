"""The fully connected layers of a network in order of execution, and the class that the last one reveals.

Under cross entropy the gradient of the last layer's output is softmax(outputs) minus the one-hot class: its only
negative entry is the class (Zhao, Mopuri and Bilen, *iDLG*, 2020). With noise the most negative entry is the best
guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from umbel.models.model import Model, Parameters
from umbel.protocol.errors import NotApplicableError


@contextmanager
def inputs_of_layers(model: Model) -> Iterator[dict[str, Tensor]]:
    """Yield a dict in which each forward pass stores the input of each ``nn.Linear``, by name, in order of
    execution."""
    seen: dict[str, Tensor] = {}

    def record(name: str, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[name] = inputs[0]

    layers = [(name, layer) for name, layer in model.module.named_modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(partial(record, name)) for name, layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def dense_layers(model: Model, parameters: Parameters, shape: tuple[int, ...]) -> list[str]:
    """Return the names of the fully connected layers in order of execution on one image of `shape`.

    Raises `NotApplicableError` if there is none, or one of them has more than one input vector for an image.
    """
    with inputs_of_layers(model) as seen, torch.no_grad():
        model.apply(parameters, torch.zeros(1, *shape, dtype=next(iter(parameters.values())).dtype))
    if not seen:
        text = f"model {model.name!r} has no fully connected layer (torch.nn.Linear)"
        raise NotApplicableError(text, code="attack.no-dense-layer")
    for name, inputs in seen.items():
        if inputs.numel() != inputs.shape[-1]:
            raise NotApplicableError(
                f"layer {name!r} of model {model.name!r} sees {inputs.numel() // inputs.shape[-1]} vectors for each "
                "image, so its gradient does not have rank one",
                code="attack.no-dense-layer",
            )
    return list(seen)


def parameter(name: str, kind: str) -> str:
    """Return the name in the state dict of a layer's ``weight`` or ``bias``; the network may itself be one layer."""
    return f"{name}.{kind}" if name else kind


def bias_label(model: Model, parameters: Parameters, gradient: Parameters, shape: tuple[int, ...]) -> int:
    """Return the class that the gradient of the last bias reveals, which is the gradient of the output.

    Raises `NotApplicableError` if no fully connected layer outputs the classes, or that layer has no bias.
    """
    _, bias = _last_layer(model, parameters, gradient, shape)
    return int(biased(model, bias).argmin())


def biased(model: Model, bias: Tensor | None) -> Tensor:
    """Return the bias of the last fully connected layer; raise `NotApplicableError` if it has none."""
    if bias is None:
        text = f"the last fully connected layer of model {model.name!r} has no bias"
        raise NotApplicableError(text, code="attack.no-bias")
    return bias


def label_given_image(model: Model, parameters: Parameters, gradient: Parameters, image: Tensor) -> int:
    """Return the class that the last layer's whole gradient reveals, given a guess of the image.

    The layer's gradient is delta, that of its output, times its input with a 1 for the bias. If the input x is known,
    least squares over all columns gives delta: G (x, 1) / |(x, 1)|^2. A poor guess suffices, since the input of a last
    layer is largely the same for all images. Raises `NotApplicableError` if no fully connected layer outputs the
    classes.
    """
    weight, bias = _last_layer(model, parameters, gradient, tuple(image.shape))
    with inputs_of_layers(model) as seen, torch.no_grad():
        model.apply(parameters, image[None].to(next(iter(parameters.values()))))
    inputs = list(seen.values())[-1].flatten().to(weight)
    delta = weight @ inputs
    return int((delta if bias is None else delta + bias).argmin())


def _last_layer(
    model: Model, parameters: Parameters, gradient: Parameters, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of weight and bias of the layer that outputs the classes."""
    last = dense_layers(model, parameters, shape)[-1]
    weight = gradient[parameter(last, "weight")]
    classes = model.apply(parameters, next(iter(parameters.values())).new_zeros(1, *shape)).shape[-1]
    if len(weight) != classes:
        text = f"the last fully connected layer of model {model.name!r} does not output the classes"
        raise NotApplicableError(text, code="attack.no-class-layer")
    return weight, gradient.get(parameter(last, "bias"))
