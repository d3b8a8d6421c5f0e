"""Deep leakage from gradients (Zhu, Liu and Han, NeurIPS 2019, Algorithm 1), with either of two misfits.

The attacker searches for an image and a label whose gradient equals the released one. As published it minimises the
squared distance of the two; Geiping et al. (*Inverting gradients*, NeurIPS 2020, Eq. 4) use the cosine, which needs no
scale. Here starts alternate, and the result that explains the release best is kept. The attack does not model noise,
images, or the larger noise of other layers: its failure says nothing about attacks that do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from umbel.models.model import Model, Parameters

# If the gradient's square is matched up to this share, the image is found, and another start finds the same.
_FOUND = 1e-5
_MEMORY = 100
_TINY = 1e-300  # replaces the square of a gradient of 0


@dataclass(frozen=True)
class Match:
    """The best result, in float64.

    Pixels of the `image` may lie outside of [0, 1]; `label` (classes,) has the probability of each class. `distance` is
    the part of the given gradient that no multiple of the image's gradient explains, as a share of its square: 1 -
    cos^2.
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
    """Search for one image of a shape by gradient matching; in float64, since L-BFGS depends on small differences.

    Contrast needs no assumption: the gradient determines it. The network should be twice differentiable (no ReLU, no
    max pooling); otherwise the attack works poorly. `gradient` is that of one image's cross entropy at the parameters,
    with or without noise. The generator draws the starts, image and logits of the label, from N(0, 1). The best of
    `restarts` starts counts, alternately with the squared distance and with the cosine; an exact match ends the search.
    Each takes at most `iterations` iterations of L-BFGS.
    """
    start = {name: value.detach().double().requires_grad_() for name, value in parameters.items()}
    target = {name: value.detach().double() for name, value in gradient.items()}
    with torch.no_grad():
        classes = model.apply(start, torch.zeros(1, *shape, dtype=torch.float64)).shape[-1]
    if restarts < 1:
        raise ValueError(f"restarts must be at least 1, got {restarts}")
    found: list[Match] = []
    for misfit in itertools.islice(itertools.cycle(_MISFITS), restarts):
        image = torch.randn(1, *shape, generator=generator, dtype=torch.float64)
        logits = torch.randn(1, classes, generator=generator, dtype=torch.float64)
        found.append(_descend(model, start, target, misfit, image, logits, iterations))
        if found[-1].distance < _FOUND:
            break
    return min(found, key=lambda match: match.distance)


# Misfits of two gradients, from their inner product and their squares.
_MISFITS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    lambda dot, own, given: (own - 2 * dot + given) / given,  # the squared distance
    lambda dot, own, given: 1 - dot / (own * given).sqrt(),  # the cosine
)


def _descend(
    model: Model,
    parameters: Parameters,
    target: Parameters,
    misfit: Callable[[Tensor, Tensor, Tensor], Tensor],
    image: Tensor,
    logits: Tensor,
    iterations: int,
) -> Match:
    """Match gradients from one start; keep the best point on the way."""
    image.requires_grad_()
    logits.requires_grad_()
    # With a line search: fixed steps diverge from about every third start.
    optimiser = torch.optim.LBFGS(
        [image, logits], max_iter=iterations, history_size=_MEMORY, tolerance_grad=1e-11, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    best = Match(image.detach()[0].clone(), logits.detach()[0].softmax(-1), math.inf)
    given = torch.stack([value.square().sum() for value in target.values()]).sum().clamp(min=_TINY)

    def distance() -> Tensor:
        nonlocal best
        optimiser.zero_grad()
        loss = -(logits.softmax(-1) * model.apply(parameters, image).log_softmax(-1)).sum()
        found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        pairs = list(zip(found, target.values(), strict=True))
        dot = torch.stack([(own * wanted).sum() for own, wanted in pairs]).sum()
        own = torch.stack([own.square().sum() for own, _ in pairs]).sum()
        apart = misfit(dot, own, given)
        apart.backward(inputs=[image, logits])
        unexplained = 1 - (dot.clamp(min=0).square() / (own * given)).item()
        if unexplained < best.distance:
            best = Match(image.detach()[0].clone(), logits.detach()[0].softmax(-1), unexplained)
        return apart

    optimiser.step(distance)
    return best
