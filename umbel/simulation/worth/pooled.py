"""One model of all training clients' rows, and whether its fit may be believed.

A fit may stop early, or end where no small step helps, such as at a network whose units are all off. So there are
several, from different starts. The lowest loss is believed if two fits reach it, and if no hypothesis of the run fits
the same rows better.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.client.cohort import Cohort
from umbel.client.learner import Learner
from umbel.client.personal.bayes import closed_form
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.words import count_of
from umbel.server.rounds import draw_hypotheses

STEPS = 100
"""Maximum number of steps of a fit."""
_FEWEST, _STARTS = 3, 8  # fits: two may end at the same bad place
_SAME = 0.01  # share of a loss's fall by which two fits that reach the same may differ


@dataclass(frozen=True)
class _Fit:
    model: Arrays
    start: float
    loss: float
    converged: bool

    def reaches(self, loss: float) -> bool:
        return self.loss <= loss + _SAME * abs(self.start - self.loss)


def fit_pooled(learner: Learner, rows: Cohort, seed: int, others: Arrays) -> tuple[Arrays, str]:
    """Fit one model to the rows of all clients; return it, and the reason to doubt that it is the best, if any.

    Parameters
    ----------
    others : dict of ndarray, each (k, \\*shape)
        The run's hypotheses, with which it is compared.
    """
    from scipy.optimize import minimize  # the import takes a third of a second

    together = Cohort(rows.features, rows.targets, rows.lengths.sum()[None])
    objective, model_of = _objective(learner, together, others)
    ready = flatten(others)
    losses = [objective(vector)[0] for vector in ready]
    least = min(filter(math.isfinite, losses), default=math.inf)
    drawn = flatten(draw_hypotheses(learner.model, _STARTS, seed, 0))
    starts = [*drawn[:_FEWEST], *([ready[losses.index(least)]] if math.isfinite(least) else []), *drawn[_FEWEST:]]
    one_minimum, fits = learner.model.linear or closed_form(learner.model), list[_Fit]()
    for start in starts:
        end = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS})
        fits.append(_Fit(model_of(end.x), objective(start)[0], float(end.fun), bool(end.success)))
        best = min(fits, key=lambda fit: fit.loss if math.isfinite(fit.loss) else math.inf)
        agree = len(fits) >= _FEWEST and sum(fit.reaches(best.loss) for fit in fits) > 1
        if (agree or (one_minimum and best.converged)) and best.reaches(least):
            return best.model, ""
    return best.model, f"since {count_of(len(fits), 'fit')} did not show which loss is the lowest"


def _objective(
    learner: Learner, cohort: Cohort, like: Arrays
) -> tuple[Callable[[NDArray[Any]], tuple[float, NDArray[np.float64]]], Callable[[NDArray[Any]], Arrays]]:
    """Return the loss of a vector of parameters with its gradient, and the model of a vector, each (1, \\*shape)."""
    shapes = {name: value.shape[1:] for name, value in like.items()}
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]

    def model_of(vector: NDArray[Any]) -> Arrays:
        parts = zip(shapes.items(), np.split(vector.astype(np.float32), ends), strict=True)
        return {name: part.reshape(1, *shape) for (name, shape), part in parts}

    def objective(vector: NDArray[Any]) -> tuple[float, NDArray[np.float64]]:
        own: dict[str, Tensor] = {
            name: torch.from_numpy(value[0]).to(learner.device).requires_grad_()
            for name, value in model_of(vector).items()
        }
        loss = learner.objective(own, cohort)
        slopes = torch.autograd.grad(loss, list(own.values()))
        return float(loss.detach()), np.concatenate([one.double().cpu().numpy().ravel() for one in slopes])

    return objective, model_of
