"""Deep leakage from gradients (Zhu, Liu and Han, NeurIPS 2019, Algorithm 1).

The attacker looks for an image and a label whose gradient is the one that was released, by
minimising the squared distance of the two gradients. The attack as published knows nothing of
noise, of images, or of other layers' noise being larger: that it fails says nothing of attacks
that do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from models.model import Model, Parameters

# Matched to this share of the gradient's square, an image is found, and another start finds the same.
_FOUND = 1e-5
_MEMORY = 100


@dataclass(frozen=True)
class Match:
    """The best of what was found.

    Attributes
    ----------
    image : Tensor, shape ``shape``, float64
        As optimised; pixels may lie outside of [0, 1].
    label : Tensor, shape (classes,), float64
        Probability of each class.
    distance : float
        Squared distance of its gradient from the one given, as a share of the latter's square.
    """

    image: Tensor
    label: Tensor
    distance: float


def deep_leakage(
    model: Model,
    parameters: Parameters,
    gradient: Parameters,
    shape: tuple[int, ...],
    generator: torch.Generator,
    restarts: int = 2,
    iterations: int = 300,
) -> Match:
    """Look for one image by gradient matching; in float64, since L-BFGS lives on small differences.

    Scale and contrast need no assumption: they are the gradient's own.

    Parameters
    ----------
    model : Model
        Its network must be twice differentiable (no ReLU, no max pooling), or little is to be expected.
    parameters : dict of Tensor
        What the client started from.
    gradient : dict of Tensor
        Of the cross entropy of one image at `parameters`, with or without noise.
    shape : tuple of int
        Of the image.
    generator : torch.Generator
        Draws the starts: image and logits of the label from N(0, 1).
    restarts : int
        Starts, of which the best counts. Fewer are made when one has found an exact match.
    iterations : int
        L-BFGS iterations a start at most.

    Returns
    -------
    Match
    """
    start = {name: value.double().requires_grad_() for name, value in _detached(parameters).items()}
    target = {name: value.double() for name, value in _detached(gradient).items()}
    square = sum(float(value.square().sum()) for value in target.values())
    with torch.no_grad():
        classes = model.apply(start, torch.zeros(1, *shape, dtype=torch.float64)).shape[-1]
    best: Match | None = None
    for _ in range(restarts):
        image = torch.randn(1, *shape, generator=generator, dtype=torch.float64)
        logits = torch.randn(1, classes, generator=generator, dtype=torch.float64)
        found = _descend(model, start, target, square or 1.0, image, logits, iterations)
        if best is None or found.distance < best.distance:
            best = found
        if best.distance < _FOUND:
            break
    if best is None:
        raise ValueError(f"restarts must be at least 1, got {restarts}")
    return best


def _descend(
    model: Model,
    parameters: Parameters,
    target: Parameters,
    square: float,
    image: Tensor,
    logits: Tensor,
    iterations: int,
) -> Match:
    """Match gradients from one start; keep the best point that was visited."""
    image.requires_grad_()
    logits.requires_grad_()
    # With a line search: fixed steps diverge from about every third start.
    optimiser = torch.optim.LBFGS(
        [image, logits], max_iter=iterations, history_size=_MEMORY, tolerance_grad=1e-11, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    best = Match(image.detach()[0].clone(), logits.detach()[0].softmax(-1), math.inf)

    def distance() -> Tensor:
        nonlocal best
        optimiser.zero_grad()
        loss = -(logits.softmax(-1) * model.apply(parameters, image).log_softmax(-1)).sum()
        found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        pairs = zip(found, target.values(), strict=True)
        apart = torch.stack([(own - wanted).square().sum() for own, wanted in pairs]).sum() / square
        apart.backward(inputs=[image, logits])
        if apart.item() < best.distance:
            best = Match(image.detach()[0].clone(), logits.detach()[0].softmax(-1), apart.item())
        return apart

    optimiser.step(distance)
    return best


def _detached(parameters: Parameters) -> Parameters:
    return {name: value.detach() for name, value in parameters.items()}
