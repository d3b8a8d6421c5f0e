"""Was this row among a client's? A malicious server sends a hypothesis that only this row moves.

One unit of the layer before the last is on for the candidate and off for the rows that the server knows, all other
units are off for all; a large weight after it makes the candidate's gradient longer than all others' together. What the
client's update is with and without the candidate, the server finds by shadow runs: it trains the same hypothesis on
made-up clients of rows that it knows. It guesses by the side of their midpoint on which the release lies, a likelihood
ratio for noise that is the same in all directions. (A trap of one unit: Nguyen et al., *Active membership inference
attack under local differential privacy in federated learning*, AISTATS 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attacks.layers import dense_layers, inputs_of_layers, parameter
from attacks.small_batch import rectified
from models.model import Model, Parameters
from protocol.errors import NotApplicableError

Vector = NDArray[np.float64]

_WEIGHT = 200.0  # after the unit
_CLASSES = 3  # at least: the candidate's, and two others
_LEAN = 20.0  # of the outputs to one class, so that all other rows pull the last bias one way


def trap(model: Model, parameters: Parameters, candidate: Tensor, label: int, images: Tensor) -> Parameters:
    r"""Return a hypothesis that the candidate moves far, and other rows hardly.

    Parameters
    ----------
    model : Model
        Its last two layers are fully connected, with ReLU between them, and have biases.
    parameters : dict of Tensor
        Those of the layers before stay.
    candidate : Tensor, shape \*shape
    label : int
        Its class.
    images : Tensor, shape (images, \*shape)
        Rows of other clients that the server knows.

    Raises
    ------
    NotApplicableError
        When the model has no such layers, or the candidate is among the images.
    """
    shape = tuple(candidate.shape)
    layers = dense_layers(model, parameters, shape)
    names = [parameter(layer, kind) for layer in layers[-2:] for kind in ("weight", "bias")]
    if (
        len(layers) < 2
        or not all(name in parameters for name in names)
        or not _ends_so(model, parameters, layers[-2:], shape)
    ):
        raise NotApplicableError(
            f"model {model.name!r} does not end in two fully connected layers with biases and ReLU between them"
        )
    weight1, bias1, weight2, bias2 = names
    with inputs_of_layers(model) as seen, torch.no_grad():
        model.apply(parameters, torch.cat([images, candidate[None].to(images)]))
        known, own = seen[layers[-2]][:-1].double(), seen[layers[-2]][-1].double()
    # 1 for the candidate and 0 for the others: what of it none of the others, less their mean, explains.
    centre = known.mean(dim=0)
    others, away = known - centre, own - centre
    aim = away - others.T @ torch.linalg.lstsq(others.T, away[:, None], driver="gelsd").solution[:, 0]
    reach = float(aim @ away)
    if reach <= 1e-6 * float(away @ away):
        raise NotApplicableError("the candidate is one of the rows that the server knows")
    aim /= reach
    moved = {name: value.clone() for name, value in parameters.items()}
    for name, value in zip(names, (0.0, -1.0, 0.0, 0.0), strict=True):
        moved[name].fill_(value)
    moved[weight1][0], moved[bias1][0] = aim.to(moved[weight1]), -float(aim @ centre) - 0.5
    # Without the candidate all outputs lean to one class; with it to another, neither of them its own.
    classes = len(moved[bias2])
    if classes < _CLASSES:
        raise NotApplicableError(f"the trap takes {_CLASSES} classes, model {model.name!r} has {classes}")
    rest, fired = (label + 1) % classes, (label + 2) % classes
    moved[bias2][rest] = _LEAN
    moved[weight2][fired, 0] = _WEIGHT
    return moved


def shadows(
    model: Model,
    parameters: Parameters,
    candidate: tuple[Tensor, int],
    images: Tensor,
    labels: Tensor,
    rows: int,
    radius: float | None,
    clients: int = 4,
) -> tuple[Vector, Vector]:
    """Return the mean updates (n,) of made-up clients without the candidate, and with it, after one step of size 1.

    Parameters
    ----------
    model : Model
    parameters : dict of Tensor
        Of `trap`.
    candidate : Tensor and int
        And its class.
    images, labels : Tensor
        Rows that the server knows; made-up clients take turns to have them.
    rows : int
        Of each client.
    radius : float or None
        To which updates are clipped.
    clients : int
        Made up for each.
    """
    means = []
    for present in (False, True):
        total: Vector | float = 0.0
        for i in range(clients):
            own = torch.arange(i * rows, (i + 1) * rows) % len(images)
            features, targets = images[own].clone(), labels[own].clone()
            if present:
                features[0], targets[0] = candidate[0], candidate[1]
            leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
            loss = torch.nn.functional.cross_entropy(model.apply(leaves, features), targets)
            update = -_flat(torch.autograd.grad(loss, list(leaves.values())))
            if radius is not None:
                update *= min(1.0, radius / max(float(np.linalg.norm(update)), 1e-300))
            total = total + update
        means.append(np.asarray(total / clients))
    return means[0], means[1]


def score(update: Vector, without: Vector, with_: Vector, others: int = 0) -> float:
    """Return above 0 where an update looks more like one with the candidate than like one without.

    Parameters
    ----------
    update : ndarray, shape (n,)
        What a client released less the hypothesis, or a site's sum.
    without, with_ : ndarray, shape (n,)
        See `shadows`.
    others : int
        How many clients without the candidate a site's sum is of besides.
    """
    return float((update - others * without - (without + with_) / 2) @ (with_ - without))


def _ends_so(model: Model, parameters: Parameters, layers: Sequence[str], shape: tuple[int, ...]) -> bool:
    before, last = (parameters[parameter(layer, "weight")] for layer in layers)
    return last.shape[1] == before.shape[0] and rectified(model, parameters, layers[0], shape)


def _flat(values: Sequence[Tensor]) -> Vector:
    return torch.cat([value.flatten() for value in values]).double().numpy()
