"""One model of all training clients' rows, and whether its fit may be believed.

A fit may stop early, or end where no small step helps, such as at a network whose units are all off. So there are
several, from different starts. The lowest loss is believed if two fits reach it, and if no hypothesis of the run fits
the same rows better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner
from umbel.client.personal.bayes import closed_form
from umbel.models.optimizers import Adam, descent_of
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import Arrays, flatten
from umbel.protocol.run_config import RunConfig
from umbel.protocol.words import count_of
from umbel.server.rounds import draw_hypotheses
from umbel.simulation.worth.plan import BATCH, NEWTON_STEPS, Plan

_FEWEST = 3  # fits by L-BFGS, where the work allows: two may end at the same bad place
_SAME = 0.01  # share of a loss's fall by which two fits that reach the same may differ
_FLAT = 0.05  # share of a loss's fall that the last quarter of the epochs may have, if it has converged
_ADAM_STEP = 1e-3


@dataclass(frozen=True)
class Fit:
    """A fit, from its start to its end.

    Attributes
    ----------
    model : dict of ndarray, each (1, \\*shape)
    start, loss : float
        The loss of all rows, before and after.
    converged : bool
        Whether the optimizer came to rest.
    """

    model: Arrays
    start: float
    loss: float
    converged: bool


@dataclass(frozen=True)
class Pooled:
    """The best of several fits.

    Attributes
    ----------
    model : dict of ndarray, each (1, \\*shape)
    remark : str
        How it was fitted.
    doubt : str
        The reason, as a clause, why a better one is likely; empty if there is none.
    """

    model: Arrays
    remark: str
    doubt: str


def fit_pooled(learner: Learner, rows: Cohort, run: RunConfig, plan: Plan, others: Arrays) -> Pooled:
    """Fit one model to the rows of all clients.

    Parameters
    ----------
    others : dict of ndarray, each (k, \\*shape)
        The run's hypotheses, with which it is compared.
    """
    doubt = ""
    if plan.newton:
        fits, least = _by_newton(learner, rows, run, plan, others)
        remark = "fitted by L-BFGS"
        one_minimum = learner.model.linear or closed_form(learner.model)
        if not _agree(fits) and not (one_minimum and _best(fits).converged):
            doubt = f"since {count_of(len(fits), 'fit')} did not show which loss is the lowest"
    else:
        fits, least = _by_epochs(learner, rows, run, plan, others)
        remark = count_of(plan.passes // 2, "epoch")
        if not _best(fits).converged:
            doubt = f"since its loss was still falling after {remark}"
    if not doubt and not _reaches(_best(fits), least):
        doubt = "since a hypothesis of the run fits the same rows better"
    return Pooled(_best(fits).model, remark, doubt)


def _best(fits: Iterable[Fit]) -> Fit:
    return min(fits, key=lambda fit: fit.loss if math.isfinite(fit.loss) else math.inf)


def _agree(fits: list[Fit]) -> bool:
    """Return whether there are enough fits, and two reach the lowest loss."""
    least = _best(fits).loss
    return len(fits) >= _FEWEST and sum(_reaches(fit, least) for fit in fits) > 1


def _reaches(fit: Fit, loss: float) -> bool:
    return fit.loss <= loss + _SAME * abs(fit.start - fit.loss)


def _by_newton(learner: Learner, rows: Cohort, run: RunConfig, plan: Plan, others: Arrays) -> tuple[list[Fit], float]:
    """Fit by L-BFGS until two fits agree, or the planned work is done; return them, and the run's lowest loss."""
    together = Cohort(rows.features, rows.targets, rows.lengths.sum()[None])
    objective, model_of = _objective(learner, together, others)
    ready = flatten(others)
    losses = [objective(vector)[0] for vector in ready]
    least = min(filter(math.isfinite, losses), default=math.inf)
    drawn = flatten(draw_hypotheses(learner.model, plan.starts, run.seed, 0))
    starts = [*drawn[:_FEWEST], *([ready[losses.index(least)]] if math.isfinite(least) else []), *drawn[_FEWEST:]]
    left, fits = plan.passes * 5 // 4 - len(losses), list[Fit]()
    for start in starts:
        most: Any = {"maxiter": NEWTON_STEPS, "maxfun": min(left, NEWTON_STEPS * 5 // 4)}
        end = minimize(objective, start, jac=True, method="L-BFGS-B", options=most)
        fits.append(Fit(model_of(end.x), objective(start)[0], float(end.fun), bool(end.success)))
        left -= end.nfev + 1
        if left <= 0 or (_agree(fits) and _reaches(_best(fits), least)):
            break
    return fits, least


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


def _by_epochs(learner: Learner, rows: Cohort, run: RunConfig, plan: Plan, others: Arrays) -> tuple[list[Fit], float]:
    """Train by the run's optimizer, and by Adam from another start; return both, and the run's lowest loss.

    Each trains as a single client with all rows would.
    """
    together = Cohort(rows.features, rows.targets, rows.lengths.sum()[None])

    def loss_of(models: Arrays) -> NDArray[np.float64]:
        losses = np.average(learner.score(models, rows)[0], axis=1, weights=rows.lengths)
        return np.where(np.isfinite(losses), losses, np.inf)

    epochs = plan.passes // 2
    last, descent = max(1, epochs // 4), replace(descent_of(run.optimizer), proximal=0.0)
    update = LocalUpdate(epochs - last, run.step_size, run.batch_size or BATCH, descent=descent)
    adam = replace(update, step_size=_ADAM_STEP, descent=Adam())
    fits = []
    for number, way in enumerate((update, adam)):
        models = [draw_hypotheses(learner.model, 1, run.seed, number)]
        for part, shuffle in ((way, "pooled"), (replace(way, local_epochs=last), "pooled, the end")):
            sources = streams(run.seed, shuffle, number, [0])
            models.append(learner.train(models[-1], np.zeros(1, np.int64), together, part, sources)[0])
        first, before, end = (float(loss_of(model)[0]) for model in models)
        fits.append(Fit(models[-1], first, end, end < first and before - end <= _FLAT * (first - end)))
    return fits, float(loss_of(others).min())
