"""A factor, an offset and weights of the hypotheses, in closed form, from a client's rows and public constants.

No constant depends on other clients' rows. Numbers are in the units of the stored targets, which are of order one.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from umbel.client.cohort import Cohort
from umbel.client.personal.predictors import Floats, Predictors, Task, mixed, same_for, sums
from umbel.models.losses import squared_error

FACTOR_RIDGE = 0.1
"""Strength with which a factor is held at 1: that of rows whose squared predictions sum to this."""
OFFSET_ROWS = 2.0
"""Strength with which an offset is held at 0: that of so many rows without a residual."""
LABEL_ROWS = 10.0
"""Strength with which each class is held at its equal share: that of so many rows of it."""
NOISE_ROWS, NOISE_SQUARE = 1.0, 0.1
"""Prior for the noise on targets: that of so many rows with this mean square."""


def calibrate(task: Task) -> Predictors:
    """Return the best hypotheses with a factor and an offset."""
    own = task.networks(task.start)
    return _fitted(own, task, task.best_outputs)


def mixture(task: Task) -> Predictors:
    """Return all hypotheses, weighted by the likelihood of the client's rows, with a factor and an offset."""
    weights = likelihoods(task)
    own = Predictors.plain(same_for(len(task.cohort), task.hypotheses), task.outputs.shape[-1], weights)
    by_row = torch.from_numpy(np.repeat(weights, task.cohort.lengths, axis=0).T).to(task.outputs.device)
    outputs = mixed(task.learner.model.loss, task.outputs.double(), by_row)
    return _fitted(own, task, outputs)


def likelihoods(task: Task) -> Floats:
    """Return the posterior weight of each hypothesis (clients, k), with a uniform prior."""
    logs = log_likelihood(task, sums(np.where(np.isnan(task.losses), np.inf, task.losses), task.cohort.lengths)).T
    top = logs.max(1, keepdims=True)
    found = np.exp(logs - np.where(np.isfinite(top), top, 0.0))
    found = np.where(np.isfinite(top), found, 1.0)
    return np.asarray(found / found.sum(1, keepdims=True), np.float64)


def log_likelihood(task: Task, losses: Floats) -> Floats:
    """Return the log-likelihood of m predictors from losses (m, clients), summed over each client's rows, up to a
    constant.

    For squares the variance of the noise is integrated out, with an inverse gamma distribution of `NOISE_ROWS` rows of
    mean square `NOISE_SQUARE`. Every other loss counts as a negative log-likelihood.
    """
    if task.learner.model.loss.per_sample is not squared_error:
        return -losses
    shape = (math.prod(task.outputs.shape[2:]) * task.cohort.lengths + NOISE_ROWS) / 2
    return np.asarray(-shape * np.log(losses + NOISE_ROWS * NOISE_SQUARE), np.float64)


def numbers(outputs: Tensor, cohort: Cohort) -> Floats:
    """Return the targets as numbers in the shape of outputs (rows, \\*output shape), classes as one-hot vectors."""
    targets = cohort.targets
    if not targets.is_floating_point() and outputs.shape[-1] > 1 and targets.ndim < outputs.ndim:
        targets = functional.one_hot(targets.long(), outputs.shape[-1])
    return np.asarray(targets.double().reshape(outputs.shape).cpu().numpy(), np.float64)


def _fitted(own: Predictors, task: Task, outputs: Tensor) -> Predictors:
    """Return predictors with the correction that suits their outputs (rows, \\*output shape) on the clients' rows."""
    kind = task.learner.model.loss.name
    if task.learner.model.loss.per_sample is squared_error:
        factor, offset = affine(outputs, task.cohort)
        return replace(own, factor=factor, offset=offset)
    if kind in ("cross-entropy", "log"):
        return replace(own, offset=label_offsets(task.cohort, outputs.shape[-1]))
    return own


def affine(outputs: Tensor, cohort: Cohort) -> tuple[Floats, Floats]:
    """Return the factor and the offset (clients, outputs) of least squares, by ridge regression towards 1 and 0."""
    p = outputs.double().cpu().numpy().reshape(-1, outputs.shape[-1]).T
    y = numbers(outputs, cohort).reshape(-1, outputs.shape[-1]).T
    lengths = cohort.lengths * math.prod(outputs.shape[1:-1])
    pp, py, sp, sy = (sums(one, lengths).T for one in (p * p, p * y, p, y))
    rows = lengths[:, None] + OFFSET_ROWS
    pp, py = pp + FACTOR_RIDGE, py + FACTOR_RIDGE
    determinant = pp * rows - sp * sp
    return (rows * py - sp * sy) / determinant, (pp * sy - sp * py) / determinant


def label_offsets(cohort: Cohort, outputs: int) -> Floats:
    """Return the logarithms (clients, outputs) of classes' frequencies among a client's rows, relative to equal ones.

    For a label of -1 or 1 and a single score, this is the logarithm of the odds.
    """
    labels = (
        cohort.targets.flatten(1).cpu().numpy() if cohort.targets.ndim > 1 else cohort.targets[:, None].cpu().numpy()
    )
    owner = np.repeat(np.arange(len(cohort)), cohort.lengths * labels.shape[1])
    classes = max(outputs, 2)
    of = (labels.ravel() > 0).astype(np.int64) if outputs == 1 else labels.ravel()
    counts = np.bincount(owner * classes + of, minlength=len(cohort) * classes).reshape(-1, classes) + LABEL_ROWS
    if outputs == 1:
        return np.log(counts[:, 1:] / counts[:, :1])
    return np.asarray(np.log(counts / counts.mean(1, keepdims=True)), np.float64)
