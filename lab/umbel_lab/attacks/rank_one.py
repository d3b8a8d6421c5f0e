"""The gradients of a network's fully connected layers on one image reveal its input, and its class.

The gradient of a fully connected layer on one sample is an outer product: delta (m,), the gradient of its output, times
its input x with a 1 for the bias, (x, 1) (Phong et al., *Privacy-preserving deep learning via additively homomorphic
encryption*, 2018, divide one row by its bias). Isotropic noise spreads over min(m, n) singular values; the signal stays
in the largest one. So the top right singular vector is the best estimate of (x, 1), up to sign and scale, that m noisy
copies of it allow.

Layers before the first fully connected one are inverted by searching for the image that gives this input, with total
variation as the prior (as in Geiping et al., *Inverting gradients*, NeurIPS 2020, Eq. 4) and pixels in [0, 1].

Under cross entropy the gradient of the last layer's output is softmax(outputs) minus the one-hot class: its only
negative entry is the class (Zhao, Mopuri and Bilen, *iDLG*, 2020). With noise the most negative entry is the best
guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from umbel.models.model import Model, Parameters
from umbel.protocol.errors import NotApplicableError

# Weight of the total variation for a unit of noise. Chosen on digits; half or double costs up to three dB.
_SMOOTHNESS = 1.0
_ITERATIONS = 200
_MEMORY = 50
# Rounds off the total variation's corner at 0, which L-BFGS cannot handle.
_CORNER = 1e-3
# Starting points: the paper's colour is unknown.
_GREYS = [i / 20 for i in range(1, 20)]


def leading_input(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, float]:
    """Return the direction of a fully connected layer's input, from its gradient, and the noise in it.

    For the gradients of weight (m, n) and bias (m,), which may be None, it is the top right singular vector (n + 1,),
    or (n,) without a bias, of length 1, in float64; 0 for a gradient of 0. The noise is its share of the vector's
    square, 0 to 1, estimated from the other singular values. The sign makes the 1 of the bias positive. Without a bias
    the inputs are assumed to be mostly positive, as after ReLU or sigmoid and in images.
    """
    gradient = torch.cat([weight, *([] if bias is None else [bias[:, None]])], dim=1).double()
    _, values, vectors = torch.linalg.svd(gradient, full_matrices=False)
    direction, top = vectors[0], float(values[0].square())
    if top == 0:
        return torch.zeros_like(direction), 1.0
    rows, columns = gradient.shape
    # Noise of equal variance in every entry: the other singular values, spread over their degrees of freedom.
    variance = float(values[1:].square().sum()) / max((rows - 1) * (columns - 1), 1)
    positive = (direction.sum() if bias is None else direction[-1]) >= 0
    return direction if positive else -direction, min(variance * columns / top, 1.0)


def invert_first_layer(
    model: Model, parameters: Parameters, gradient: Parameters, shape: tuple[int, ...], iterations: int = _ITERATIONS
) -> Tensor:
    """Return the image of a shape, pixels in [0, 1], that the first fully connected layer's gradient reveals.

    The bias fixes the scale: its entry of (x, 1) is 1. Without a bias only the earlier layers' own biases and the
    pixels' range fix it. `gradient` is that of one image's loss at the parameters, with or without noise; `iterations`
    is the maximum for L-BFGS. Raises `NotApplicableError` if the network has no ``torch.nn.Linear`` with one input
    vector for an image.
    """
    first = dense_layers(model, parameters, shape)[0]
    direction, noise = leading_input(gradient[parameter(first, "weight")], gradient.get(parameter(first, "bias")))
    wanted = direction.float()
    parameters = {name: value.detach().float() for name, value in parameters.items()}

    def misfit(image: Tensor) -> Tensor:
        model.apply(parameters, image[None])
        features = inputs[first].flatten()
        if len(wanted) > len(features):
            features = torch.cat([features, features.new_ones(1)])
        # Given the direction, delta and its length are free; only angles remain to be matched.
        return (nn.functional.normalize(features, dim=0) - wanted).square().sum()

    with inputs_of_layers(model) as inputs:
        # Dark or white paper: start from the single grey that fits best. From another one a smooth network is not
        # inverted.
        with torch.no_grad():
            grey = min(_GREYS, key=lambda grey: float(misfit(torch.full(shape, grey))))
        # Pixels are sin^2 of the optimised variable: from 0 to 1, both included.
        angle = torch.full(shape, math.asin(math.sqrt(grey)), requires_grad=True)
        optimiser = torch.optim.LBFGS(
            [angle], max_iter=iterations, history_size=_MEMORY, tolerance_grad=1e-10, tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def loss() -> Tensor:
            optimiser.zero_grad()
            image = angle.sin().square()
            total = misfit(image) + _SMOOTHNESS * noise * total_variation(image)
            total.backward(inputs=[angle])
            return total

        optimiser.step(loss)
    return angle.detach().sin().square()


def total_variation(image: Tensor) -> Tensor:
    """Return the mean difference of neighbouring pixels of an image (height, width), down plus across."""
    down, across = image.diff(dim=-2), image.diff(dim=-1)
    return (down.square() + _CORNER**2).sqrt().mean() + (across.square() + _CORNER**2).sqrt().mean()


@contextmanager
def inputs_of_layers(model: Model) -> Iterator[dict[str, Tensor]]:
    """Yield a dict in which each forward pass stores the input of each ``nn.Linear``, by name, in order of
    execution."""
    inputs: dict[str, Tensor] = {}

    def record(name: str, _layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs[name] = given[0]

    layers = [(name, layer) for name, layer in model.module.named_modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(partial(record, name)) for name, layer in layers]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def dense_layers(model: Model, parameters: Parameters, shape: tuple[int, ...]) -> list[str]:
    """Return the names of the fully connected layers in order of execution on one image of `shape`.

    Raises `NotApplicableError` if there is none, or one of them has more than one input vector for an image.
    """
    with inputs_of_layers(model) as inputs, torch.no_grad():
        model.apply(parameters, torch.zeros(1, *shape, dtype=next(iter(parameters.values())).dtype))
    if not inputs:
        text = f"model {model.name!r} has no fully connected layer (torch.nn.Linear)"
        raise NotApplicableError(text, code="attack.no-dense-layer")
    for name, vectors in inputs.items():
        if vectors.numel() != vectors.shape[-1]:
            raise NotApplicableError(
                f"layer {name!r} of model {model.name!r} sees {vectors.numel() // vectors.shape[-1]} vectors for each "
                "image, so its gradient does not have rank one",
                code="attack.no-dense-layer",
            )
    return list(inputs)


def parameter(name: str, kind: str) -> str:
    """Return the name in the state dict of a layer's ``weight`` or ``bias``; the network may itself be one layer."""
    return f"{name}.{kind}" if name else kind


def bias_label(model: Model, parameters: Parameters, gradient: Parameters, shape: tuple[int, ...]) -> int:
    """Return the class that the gradient of the last bias reveals, which is the gradient of the output.

    Raises `NotApplicableError` if no fully connected layer outputs the classes, or that layer has no bias.
    """
    _, bias = _last_layer(model, parameters, gradient, shape)
    if bias is None:
        text = f"the last fully connected layer of model {model.name!r} has no bias"
        raise NotApplicableError(text, code="attack.no-bias")
    return int(bias.argmin())


def label_given_image(model: Model, parameters: Parameters, gradient: Parameters, image: Tensor) -> int:
    """Return the class that the last layer's whole gradient reveals, given a guess of the image.

    The layer's gradient is delta, that of its output, times its input with a 1 for the bias. If the input x is known,
    least squares over all columns gives delta: G (x, 1) / |(x, 1)|^2. A poor guess suffices, since the input of a last
    layer is largely the same for all images. Raises `NotApplicableError` if no fully connected layer outputs the
    classes.
    """
    weight, bias = _last_layer(model, parameters, gradient, tuple(image.shape))
    with inputs_of_layers(model) as inputs, torch.no_grad():
        model.apply(parameters, image[None].to(next(iter(parameters.values()))))
    delta = weight @ list(inputs.values())[-1].flatten().to(weight)
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
