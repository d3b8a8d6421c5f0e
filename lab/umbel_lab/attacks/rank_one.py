"""Reading a layer's input off its gradient, through noise.

The gradient of a fully connected layer on one sample is an outer product: delta (m,), the gradient of its output, times
its input x with a 1 for the bias, (x, 1) (Phong et al., *Privacy-preserving deep learning via additively homomorphic
encryption*, 2018, divide one row by its bias). Isotropic noise spreads over min(m, n) singular values; the signal stays
in the largest one. So the top right singular vector is the best estimate of (x, 1), up to sign and scale, that m noisy
copies of it allow.

Layers before the first fully connected one are inverted by searching for the image that gives this input, with total
variation as the prior (as in Geiping et al., *Inverting gradients*, NeurIPS 2020, Eq. 4) and pixels in [0, 1].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from umbel.models.model import Model, Parameters
from umbel_lab.attacks.layers import dense_layers, inputs_of_layers, parameter

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
    return image_of_input(model, parameters, shape, direction, noise, iterations)


def image_of_input(
    model: Model,
    parameters: Parameters,
    shape: tuple[int, ...],
    direction: Tensor,
    noise: float,
    iterations: int = _ITERATIONS,
) -> Tensor:
    """Return the image that gives the first fully connected layer an input, as `leading_input` estimates it.

    `direction` (n,), or (n + 1,) with a 1 for the bias, has length 1; `noise` is the noise's share of its square. See
    `invert_first_layer` for the rest.
    """
    parameters = {name: value.detach().float() for name, value in parameters.items()}
    first = dense_layers(model, parameters, shape)[0]
    wanted = direction.float()

    def misfit(image: Tensor) -> Tensor:
        model.apply(parameters, image[None])
        features = seen[first].flatten()
        if len(wanted) > len(features):
            features = torch.cat([features, features.new_ones(1)])
        # Given the direction, delta and its length are free; only angles remain to be matched.
        return (torch.nn.functional.normalize(features, dim=0) - wanted).square().sum()

    with inputs_of_layers(model) as seen:
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
