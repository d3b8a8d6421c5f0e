"""Taking a sum over many images apart, by a hypothesis that counts them into bins (Fowl et al., 2022).

All units of a fully connected layer measure the same of an image, the mean of the layer's inputs, and differ only in
their thresholds. ReLU lets an image through the units whose threshold it exceeds, and the next layer treats them all
alike. So the gradients of two units with adjacent thresholds differ by what the images between these thresholds give.
If there is only one, the difference is a multiple of its input, with a 1 for the bias (*Robbing the Fed: directly
obtaining private data in federated learning with modified models*, ICLR 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

from umbel.models.model import Model, Parameters
from umbel.protocol.errors import NotApplicableError
from umbel_lab.attacks.layers import dense_layers, inputs_of_layers, parameter
from umbel_lab.attacks.small_batch import two_layers

_PULL = 1e-3  # of a unit on the outputs: so little that all images have about the same weight in a sum


def binning(model: Model, parameters: Parameters, images: Tensor, generator: torch.Generator) -> Parameters:
    r"""Return a hypothesis of which each unit is on for the images with more than its share of the layer's input.

    The bins are equally likely for a normal distribution with the mean and the deviation of the measure on `images`
    (images, \*shape), which belong to other clients. The generator draws how the units act on the outputs. Raises
    `NotApplicableError` unless the model's only two fully connected layers end it, with biases and ReLU in between.
    """
    shape = tuple(images.shape[1:])
    layer, (weight1, bias1, weight2, bias2) = two_layers(model, parameters, shape)
    if layer != dense_layers(model, parameters, shape)[0]:
        text = f"model {model.name!r} has more than two fully connected layers; the attack sets the last two"
        raise NotApplicableError(text, code="attack.no-two-layers")
    moved = {name: value.clone() for name, value in parameters.items()}
    measured = _measured(model, parameters, layer, images)
    units = len(moved[bias1])
    shares = (torch.arange(units, dtype=torch.float64) + 0.5) / units
    thresholds = measured.mean() + measured.std() * torch.special.ndtri(shares)
    moved[weight1][:] = 1 / moved[weight1].shape[1]
    moved[bias1] = -thresholds.to(moved[bias1])
    pull = torch.randn(len(moved[bias2]), 1, generator=generator, dtype=torch.float64)
    moved[weight2] = (_PULL * pull).expand_as(moved[weight2]).to(moved[weight2]).clone()
    moved[bias2] = torch.zeros_like(moved[bias2])
    return moved


def bins_of(model: Model, parameters: Parameters, images: Tensor) -> list[int]:
    r"""Return the bin of each of the images (images, \*shape) under a hypothesis of `binning`; -1 for none."""
    layer = dense_layers(model, parameters, tuple(images.shape[1:]))[0]
    bias = parameter(layer, "bias")
    above = _measured(model, parameters, layer, images)[:, None] > -parameters[bias].double()
    return [int(own.sum()) - 1 for own in above]


def inputs_by_bin(model: Model, parameters: Parameters, gradient: Parameters, shape: tuple[int, ...]) -> Tensor:
    """Return the layer's input in each bin, (units, n + 1), up to scale, with the last number not negative.

    `gradient` is that of a sum of images of a shape, at a hypothesis of `binning`. The input belongs to an image if its
    bin has only one. Noise in the gradient is twice as large here, in variance.
    """
    layer = dense_layers(model, parameters, shape)[0]
    weight, bias = (gradient[parameter(layer, kind)] for kind in ("weight", "bias"))
    units = torch.cat([weight, bias[:, None]], dim=1).double()
    apart = units - torch.cat([units[1:], units.new_zeros(1, units.shape[1])])
    inputs: Tensor = apart * torch.where(apart[:, -1:] < 0, -1.0, 1.0)
    return inputs


def _measured(model: Model, parameters: Parameters, layer: str, images: Tensor) -> Tensor:
    """Return the mean of a layer's input for each image."""
    with inputs_of_layers(model) as seen, torch.no_grad():
        model.apply(parameters, images.to(next(iter(parameters.values()))))
    return seen[layer].double().mean(dim=1)
