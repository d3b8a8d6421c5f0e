"""Two questions that a malicious server asks about a client, by the hypotheses that it sends.

Was this row among the client's? The hypothesis is one that this row moves in the opposite direction.

One unit of the second-to-last layer is on for the candidate and off for the rows that the server knows. Another is on
for all rows, and its weights move by the common part of all rows: in one direction for a row for which the first unit
is off, and by far more in the opposite direction for the candidate. So a clipped update without the candidate is the
opposite of one with it, which is as far apart as two updates of the clip norm can be. All other units are off. The
server finds the client's update with and without the candidate by shadow runs: it trains the same hypothesis on
artificial clients of rows that it knows. It guesses by the side of their midpoint on which the release lies, a
likelihood ratio for isotropic noise. (A trap of one unit: Nguyen et al., *Active membership inference
attack under local differential privacy in federated learning*, AISTATS 2023.)

Which of two hypotheses fits the client? They differ only in the last bias: one leans to the classes below a border and
the other to those from there on, so that the choice reveals on which side a client's labels lie. A number that is
added to all last biases changes no prediction; it differs by so much that a release shows where its client started,
for any noise.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.models.model import Model, Parameters
from umbel.protocol.errors import NotApplicableError
from umbel_lab.attacks.layers import biased, dense_layers, inputs_of_layers, parameter
from umbel_lab.attacks.small_batch import two_layers

Vector = NDArray[np.float64]

_CLASSES = 3  # minimum: the candidate's, and two others
_LEAN = 20.0  # of the outputs to one class, for all rows but the candidate
_WEIGHT = 100.0  # after the unit that is on for the candidate
_QUIET = 2.0**-10  # output of the unit that is on for all: so small that its own weights move most
_PULL, _PUSH = 2.0**5, 2.0**13  # after it: how strongly other rows move its weights, and how strongly the candidate
_TILT = 1.0  # of the biases to one side of the border
_APART = 64.0  # between the last biases of two hypotheses; exact in 32 bits
_LIFT = 5.0  # of the biases before the two layers, a common part of all rows


def trap(
    model: Model, parameters: Parameters, candidate: Tensor, label: int, images: Tensor, labels: Tensor
) -> Parameters:
    r"""Return a hypothesis that the candidate moves in one direction, and other rows in the opposite one.

    The model's last two layers are fully connected, with ReLU between them, and have biases; the weights of earlier
    layers do not change. `label` is the class of the candidate (\*shape); the server knows `images` (images, \*shape)
    of other clients. Raises `NotApplicableError` if the model has no such layers, or the candidate is among the images.
    """
    shape = tuple(candidate.shape)
    layer, names = two_layers(model, parameters, shape)
    weight1, bias1, weight2, bias2 = names
    moved = {name: value.clone() for name, value in parameters.items()}
    leaves = (name for name, module in model.module.named_modules() if not list(module.children()))
    biases = [name for leaf in leaves if (name := parameter(leaf, "bias")) in parameters]
    if at := biases.index(bias1):
        moved[biases[at - 1]] += _LIFT
    with inputs_of_layers(model) as seen, torch.no_grad():
        model.apply(moved, torch.cat([images, candidate[None].to(images)]))
        known, own = seen[layer][:-1].double(), seen[layer][-1].double()
    # 1 for the candidate and 0 for the others: the part of it that the others, minus their mean, do not explain.
    centre = known.mean(dim=0)
    others, away = known - centre, own - centre
    aim = away - others.T @ torch.linalg.lstsq(others.T, away[:, None], driver="gelsd").solution[:, 0]
    reach = float(aim @ away)
    if reach <= 1e-6 * float(away @ away):
        raise NotApplicableError("the candidate is one of the rows that the server knows", code="attack.known-row")
    aim /= reach
    classes = len(moved[bias2])
    if classes < _CLASSES:
        text = f"the trap needs {_CLASSES} classes, but model {model.name!r} has {classes}"
        raise NotApplicableError(text, code="attack.too-few-classes")
    # Rare classes: a row of the first would undo the candidate's effect, one of the second has no effect.
    rare = torch.bincount(labels, minlength=classes).argsort(stable=True).tolist()
    fired, rest = [one for one in rare if one != label][:2]
    for name, value in zip(names, (0.0, -1.0, 0.0, 0.0), strict=True):
        moved[name].fill_(value)
    moved[weight1][0], moved[bias1][0] = aim.to(moved[weight1]), -float(aim @ centre) - 0.5
    moved[bias1][1] = _QUIET
    # Without the candidate all outputs lean to one class; with it to another, neither of them its own.
    moved[weight2][rest, 1], moved[bias2][rest] = _PULL, _LEAN - _PULL * _QUIET
    moved[weight2][fired, 1], moved[bias2][fired] = -_PUSH, _PUSH * _QUIET
    moved[weight2][fired, 0] = _WEIGHT
    return moved


def shadows(
    model: Model,
    parameters: Parameters,
    candidate: tuple[Tensor, int],
    images: Tensor,
    labels: Tensor,
    rows: int,
    clip_norm: float | None,
    clients: int = 4,
) -> tuple[Vector, Vector]:
    """Return the mean updates (n,) of made-up clients without the candidate, and with it, after one step of size 1.

    They start from the parameters of `trap` and take turns to have the rows that the server knows, so many each. The
    candidate comes with its class. Updates are clipped to the clip norm, if there is one.
    """

    def update(client: int, present: bool) -> Vector:
        own = torch.arange(client * rows, (client + 1) * rows) % len(images)
        features, targets = images[own].clone(), labels[own].clone()
        if present:
            features[0], targets[0] = candidate
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        loss = torch.nn.functional.cross_entropy(model.apply(leaves, features), targets)
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        moved: Vector = -torch.cat([value.flatten() for value in slopes]).double().numpy()
        if clip_norm is not None:
            moved *= min(1.0, clip_norm / max(float(np.linalg.norm(moved)), 1e-300))
        return moved

    without, with_ = (np.mean([update(i, present) for i in range(clients)], axis=0) for present in (False, True))
    return without, with_


def score(update: Vector, without: Vector, with_: Vector, others: int = 0) -> float:
    """Return above 0 where an update looks more like one with the candidate than like one without (`shadows`).

    The update (n,) is what a client released less the hypothesis, or a site's sum, of which so many other clients do
    not have the candidate.
    """
    return float((update - others * without - (without + with_) / 2) @ (with_ - without))


def apart(model: Model, parameters: Parameters, shape: tuple[int, ...], border: int) -> tuple[list[Parameters], str]:
    """Return the two hypotheses, made from these parameters, and the name of the bias in which they differ.

    `shape` is that of a row, and `border` the first class that the second leans to. Raises `NotApplicableError` when
    the last fully connected layer has no bias.
    """
    name = parameter(dense_layers(model, parameters, shape)[-1], "bias")
    found = []
    for side in (0, 1):
        bias = biased(model, parameters.get(name)).clone()
        bias[border:] += _TILT * side
        bias[:border] += _TILT * (1 - side)
        found.append({**parameters, name: bias + _APART * (2 * side - 1)})
    return found, name


def started_from(released: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return which of the two clients trained, by the bias (m, classes) in their releases."""
    started: NDArray[np.int64] = (released.mean(axis=1) > 0).astype(np.int64)
    return started
