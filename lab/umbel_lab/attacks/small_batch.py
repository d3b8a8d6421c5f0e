"""Taking a small batch apart: the inputs of a ReLU layer for each of several rows, from one gradient.

The gradient of a fully connected layer on b rows is a product D X, with D (m, b) the gradients of its outputs and
X (b, n + 1) its inputs, each with a 1 for the bias. So it has rank b, and its singular vectors U give D = U Q up to
an unknown Q (b, b). ReLU sets D to exactly 0 wherever a unit is off for a row; hence a column of Q is a direction q
along which U q is 0 in many units, and hardly any other direction has that (Dimitrov et al., *SPEAR: exact gradient
inversion of batches in federated learning*, NeurIPS 2024). SPEAR draws sets of b - 1 units and looks whether their
common null vector is such a direction, which takes 2^b draws. Here directions are made sparse by descent from random
ones, as in dictionary learning: iteratively reweighted least squares on sum_j log((U q)_j^2 + tau^2), where tau
shrinks to the size of the noise. Without noise the rows are exact; with noise, each is as blurred as it says.

The inputs are those of a row up to scale, which the 1 of the bias fixes. The units that are on for a row can be
worked out from its input as well: where these are not the units that D has, the row has not been found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from umbel.models.model import Model, Parameters
from umbel.protocol.errors import NotApplicableError
from umbel_lab.attacks.layers import dense_layers, inputs_of_layers, parameter

SURE = 0.99
"""The share of units at which the attacker itself counts a row as found."""

_STARTS = 60  # random directions for each row
_STEPS = 40
_SHRINK = 0.7  # factor on tau in a step
_DEVIATIONS = 3.0  # of the noise, within which a number may be a 0
_EXACT = 1e-5  # relative error of a 0 in 32-bit numbers
_EDGE = 1.1  # above the largest singular value of noise alone
_NEW = 0.05  # minimum share of a direction's length outside of those found before


@dataclass(frozen=True)
class Rows:
    """The findings in a gradient about the b rows that it was computed on.

    `inputs` (b, n + 1), float64, are directions of a layer's inputs, each with a 1 for the bias: of length 1, the last
    number positive. `noise` is the noise's share of the square of each, 0 to 1. `agreement` is the share of units that
    are on or off for a row as its input predicts; from `SURE` on the attacker knows.
    """

    inputs: Tensor
    noise: tuple[float, ...]
    agreement: tuple[float, ...]


def rows_in(
    model: Model,
    parameters: Parameters,
    gradient: Parameters,
    shape: tuple[int, ...],
    generator: torch.Generator,
    most: int = 16,
) -> Rows:
    """Return the inputs of the first fully connected layer, with bias and ReLU, for each row of a batch.

    `gradient` is that of the batch's mean loss at the parameters, with or without noise; `shape` that of a row. The
    generator draws initial directions; the search is for at most `most` rows.

    Raises `NotApplicableError` if there is no such layer; if noise, or more rows than `most`, leave no low rank; or if
    fewer directions than rows are sparse, as when units are on for all rows or for none. If rows have similar labels
    and units, or several steps were taken, the result may be wrong; its agreement shows it.
    """
    layer = dense_layers(model, parameters, shape)[0]
    weight, bias = gradient[parameter(layer, "weight")], gradient.get(parameter(layer, "bias"))
    if bias is None:
        text = f"layer {layer!r} of model {model.name!r} has no bias, which would show the scale of rows"
        raise NotApplicableError(text, code="attack.no-bias")
    if not rectified(model, parameters, layer, shape):
        text = f"layer {layer!r} of model {model.name!r} has no ReLU after it, whose zeros would separate rows"
        raise NotApplicableError(text, code="attack.no-relu")
    product = torch.cat([weight, bias[:, None]], dim=1).double()
    units, values, right = torch.linalg.svd(product, full_matrices=False)
    rank, deviation = _rank(values, product.shape)
    if not 0 < rank <= min(most, len(values) - 1):
        raise NotApplicableError(
            f"the gradient of layer {layer!r} shows {rank} rows beside its noise; the attack separates 1 to {most} of "
            "a single step with little noise",
            code="attack.no-low-rank",
        )
    units, values, right = units[:, :rank], values[:rank], right[:rank]
    found = _sparse(units, values, deviation, generator)
    if len(found) < rank:
        text = f"{len(found)} of {rank} rows differ in their active units"
        raise NotApplicableError(text, code="attack.no-sparse-rows")
    apart = torch.stack(found)
    mixing = torch.linalg.inv(apart.T)
    inputs = mixing @ (values[:, None] * right)
    lengths = inputs.norm(dim=1)
    noise = (inputs.shape[1] * (deviation * mixing.norm(dim=1) / lengths).square()).clamp(max=1.0)
    inputs = inputs * (inputs[:, -1:].sign() / lengths[:, None])
    # Whether units are on, by the layer's own weights and by the gradient of their outputs.
    own = torch.cat([parameters[parameter(layer, "weight")], parameters[parameter(layer, "bias")][:, None]], dim=1)
    on = inputs @ own.double().T > 0
    moved = (apart @ units.T).abs() > _thresholds(apart, values, deviation)[:, None]
    return Rows(inputs, tuple(noise.tolist()), tuple((on == moved).double().mean(dim=1).tolist()))


def rectified(model: Model, parameters: Parameters, layer: str, shape: tuple[int, ...]) -> bool:
    """Return whether a layer's negative outputs have no effect, and its positive ones have one."""
    generator = torch.Generator().manual_seed(0)
    own = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    images = torch.randn(32, *shape, generator=generator).to(next(iter(own.values())))
    scores, output = _with_output(model, own, layer, images)
    weights = torch.randn(scores.shape, generator=generator).to(scores)
    (slopes,) = torch.autograd.grad((scores * weights).sum(), output)
    off = output <= 0
    return bool((slopes[off] == 0).all() and (slopes[~off] != 0).any())


def two_layers(model: Model, parameters: Parameters, shape: tuple[int, ...]) -> tuple[str, list[str]]:
    """Return the last fully connected layer but one, and the names of weight and bias of it and of the last.

    `shape` is that of a row. Raises `NotApplicableError` unless both have biases, and only ReLU is between them.
    """
    layers = dense_layers(model, parameters, shape)
    names = [parameter(layer, kind) for layer in layers[-2:] for kind in ("weight", "bias")]
    fits = len(layers) > 1 and parameters.keys() >= set(names)
    if fits:
        before, last = (parameters[parameter(layer, "weight")] for layer in layers[-2:])
        fits = last.shape[1] == before.shape[0] and rectified(model, parameters, layers[-2], shape)
    if not fits:
        text = f"model {model.name!r} does not end in two fully connected layers with biases and ReLU between them"
        raise NotApplicableError(text, code="attack.no-two-layers")
    return layers[-2], names


def _with_output(model: Model, parameters: Parameters, name: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a network, and that of one of its modules."""
    kept: list[Tensor] = []
    hook = model.module.get_submodule(name).register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    try:
        return model.apply(parameters, images), kept[0]
    finally:
        hook.remove()


def poised(model: Model, parameters: Parameters, images: Tensor) -> Parameters:
    """Return parameters that a server can send to separate rows: with biases from public images.

    Blank paper, the median pixel everywhere, switches on no unit before the first fully connected layer, so that rows
    have little in common; each unit of that layer is on for half of the images. These belong to other clients than the
    attacked ones. The weights do not change.
    """
    moved = {name: value.clone() for name, value in parameters.items()}
    shape = tuple(images.shape[1:])
    first = dense_layers(model, parameters, shape)[0]
    blank = images.median().expand(1, *shape)
    for name, module in model.module.named_modules():
        if name == first:
            break
        if parameter(name, "bias") not in moved or list(module.children()):
            continue
        with torch.no_grad():
            _, output = _with_output(model, moved, name, blank)
        moved[parameter(name, "bias")] -= output[0].flatten(1).mean(dim=1)
    with inputs_of_layers(model) as seen, torch.no_grad():
        model.apply(moved, images)
    bias = parameter(first, "bias")
    moved[bias] = -(seen[first] @ moved[parameter(first, "weight")].T).median(dim=0).values
    return moved


def _rank(values: Tensor, shape: torch.Size) -> tuple[int, float]:
    """Return how many singular values exceed noise of one deviation in every entry, and that deviation.

    They are tested in turn: the next one must be larger than noise of the size of the rest would give.
    """
    rows, columns = shape
    exact = int((values > _EXACT * values[0]).sum())
    if exact < len(values):
        return exact, math.sqrt(float(values[exact:].square().mean()) / max(shape))
    for rank, value in enumerate(values.tolist()):
        rest = float(values[rank:].square().sum())
        deviation = math.sqrt(rest / max((rows - rank) * (columns - rank), 1))
        if value <= _EDGE * deviation * (math.sqrt(rows) + math.sqrt(columns)):
            return rank, deviation
    return len(values), 0.0


def _sparse(units: Tensor, values: Tensor, deviation: float, generator: torch.Generator) -> list[Tensor]:
    """Return directions (b,) along which most units (m, b) are 0: as many as are independent, at most b."""
    rank = units.shape[1]
    live = units[units.norm(dim=1) > _EXACT]
    ways = torch.randn(_STARTS * rank, rank, generator=generator, dtype=torch.float64)
    for step in range(_STEPS):
        tau = _thresholds(ways, values, deviation).clamp(min=0.5 * _SHRINK**step / math.sqrt(len(units)))
        weights = 1 / ((ways @ live.T).square() + tau[:, None].square())
        ways = torch.linalg.eigh(torch.einsum("sj,jk,jl->skl", weights, live, live))[1][:, :, 0]
    limits = _thresholds(ways, values, deviation)
    zeros = ((ways @ live.T).abs() < limits[:, None]).sum(dim=1)
    # The number of zeros beyond those by chance along a direction without structure. As many as b - 1 mean nothing: any
    # direction can be made to have them.
    chance = torch.erf(limits * math.sqrt(len(units) / 2))
    wonder = (zeros - len(live) * chance) / (len(live) * chance * (1 - chance)).clamp(min=1e-12).sqrt()
    wonder[zeros < (rank if rank > 1 else 0)] = -math.inf
    order = wonder.argsort(descending=True, stable=True)
    found: list[Tensor] = []
    for way in ways[order[wonder[order] > -math.inf]]:
        rest = way
        if found:
            basis = torch.stack(found, dim=1)
            rest = way - basis @ torch.linalg.lstsq(basis, way[:, None]).solution[:, 0]
        if rest.norm() > _NEW:
            found.append(way)
        if len(found) == rank:
            break
    return found


def _thresholds(ways: Tensor, values: Tensor, deviation: float) -> Tensor:
    """Return the limit below which a number may be a 0, for units along each of the ways (s, b)."""
    noise: Tensor = _DEVIATIONS * deviation * (nn.functional.normalize(ways, dim=1) / values).norm(dim=1)
    return noise.clamp(min=_EXACT)
