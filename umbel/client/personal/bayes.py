"""A Gaussian prior around each hypothesis: the posterior mean for linear models, else a weighted proximal term.

A client's parameters are ``w ~ N(w_j, s S_j)`` around hypothesis j, and its targets are those of ``w`` with noise of
variance ``s r``. The common scale s is integrated out (a normal-inverse-gamma prior). The ratio r of noise to
differences between clients is averaged over `RATIOS` by its prior times the evidence of the client's rows, and the
hypotheses likewise. S_j is `public`; at most half of it is the server's estimate from releases (`umbel.models.prior`).

The idea is that of Ozkara, Girgis, Data and Diggavi, *A statistical framework for personalized federated learning
and estimation* (ICLR 2023), who learn the prior beside the clients' models.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import nn

from umbel.client.cohort import Cohort
from umbel.client.learner import Learner
from umbel.client.personal.calibrate import numbers
from umbel.client.personal.predictors import Floats, Predictors, Task, hypothesis_outputs, sums
from umbel.client.personal.tune import tuned
from umbel.models.losses import squared_error
from umbel.models.model import Model
from umbel.models.networks import Linear
from umbel.protocol.arrays import LARGEST_COVARIANCE, Arrays, flatten, unflatten

ROUND = 0.03
"""The isotropic share of the public covariance."""
PROXIMAL = 0.1
"""Strength with which parameters are held at the hypothesis if there is no closed form."""
RATIOS = np.logspace(-4, 2, 13)
_PREFERRED, _SPREAD = 0.01, 2.0  # of the ratio: its median, and the deviation of its logarithm
_ROWS, _SQUARE = 1.0, 2e-4  # of the scale: equivalent to so many rows of this mean square


def bayes(task: Task) -> Predictors:
    """Return each client's posterior mean."""
    if closed_form(task.learner.model):
        return task.networks(unflatten(_posterior(task), task.hypotheses))
    return task.networks(_proximal(task))


def closed_form(model: Model) -> bool:
    """Whether outputs are linear in the few parameters, and the loss is a square."""
    layers = [layer for layer in model.module.modules() if next(layer.children(), None) is None]
    linear = [layer for layer in layers if isinstance(layer, (nn.Linear, Linear))]
    plain = len(linear) == 1 and all(isinstance(layer, (nn.Linear, Linear, nn.Flatten)) for layer in layers)
    return plain and model.loss.per_sample is squared_error and model.num_parameters <= LARGEST_COVARIANCE


def as_regression(learner: Learner, like: Arrays, cohort: Cohort) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Return the least squares problem of a model with a `closed_form`, whose parameters have the shapes of `like`.

    The contribution of each parameter to an output is that parameter's unit network minus the zero network.

    Returns
    -------
    design : ndarray, shape (n, numbers)
        Of all clients' outputs, side by side.
    targets : ndarray, shape (numbers,)
    lengths : ndarray of int, shape (clients,)
        Numbers of each client.
    """
    n = flatten(like).shape[1]
    units = unflatten(np.concatenate([np.zeros((1, n)), np.eye(n)]), like)
    outputs = hypothesis_outputs(learner, units, cohort)
    found = outputs.double().cpu().numpy().reshape(n + 1, -1)
    targets = numbers(outputs[0], cohort).ravel() - found[0]
    return found[1:] - found[0], targets, cohort.lengths * math.prod(outputs.shape[2:])


def public(centres: Floats) -> Floats:
    """Return the covariance (k, n, n) around each centre (k, n), of trace 1, without using any client's rows.

    Clients differ most by a factor: ``w_j w_j'``, and by `ROUND` in all directions.
    """
    n = centres.shape[1]
    squares = np.square(centres).sum(1)[:, None, None]
    along = centres[:, :, None] * centres[:, None] / np.where(squares > 0, squares, 1.0)
    return np.asarray((along + ROUND * np.eye(n) / n) / (1 + ROUND), np.float64)


def _posterior(task: Task) -> Floats:
    """Return the posterior mean (clients, n) of each client's parameters."""
    centres = flatten(task.hypotheses)
    design, targets, lengths = as_regression(task.learner, task.hypotheses, task.cohort)
    gram = sums(design[:, None] * design, lengths).transpose(2, 0, 1)
    known, covariances = _log_prior(), public(centres)
    if task.prior is not None:
        covariances = task.prior.with_public(covariances)
    covariances *= np.square(centres).sum(1)[:, None, None]
    evidences, means = [], []
    for centre, covariance in zip(centres, covariances, strict=True):
        residuals = targets - centre @ design
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0))
        # In these coordinates the prior's covariance is the identity, and a client's Gram matrix is diagonal.
        spread, turned = np.linalg.eigh(root.T @ gram @ root)
        spread = np.maximum(spread, 0)[:, None]
        pull = np.einsum("cij,ci->cj", turned, sums(design * residuals, lengths).T @ root)[:, None]
        shrunk = pull / (spread + RATIOS[:, None])
        left = (sums(residuals * residuals, lengths)[:, None] - (pull * shrunk).sum(-1)) / RATIOS
        logs = -0.5 * np.log1p(spread / RATIOS[:, None]).sum(-1) - lengths[:, None] / 2 * np.log(RATIOS)
        shape = (lengths[:, None] + _ROWS) / 2
        evidences.append(known + logs - shape * np.log((_ROWS * _SQUARE + np.maximum(left, 0)) / 2))
        means.append(centre + np.einsum("cri,cji->crj", shrunk, turned) @ root.T)
    logs = np.stack(evidences, 1)
    weights = np.exp(logs - logs.max((1, 2), keepdims=True))
    weights /= weights.sum((1, 2), keepdims=True)
    return np.asarray(np.einsum("ckr,ckrn->cn", weights, np.stack(means, 1)), np.float64)


def _log_prior() -> Floats:
    logs = -np.square(np.log(RATIOS / _PREFERRED) / _SPREAD) / 2
    return np.asarray(logs - np.log(np.exp(logs).sum()), np.float64)


def _proximal(task: Task) -> Arrays:
    r"""Return each client's best hypothesis (clients, \*shape), trained further and pulled back after each epoch.

    ``PROXIMAL / 2N sum((w - w_j)^2 / S)`` is added to the mean loss over N rows, with S the variances relative to their
    mean: an epoch of the loss, then the proximal step of the rest in closed form.
    """
    anchors = flatten(task.hypotheses)
    squares = np.square(anchors)
    totals = squares.sum(1, keepdims=True)
    shares = squares / np.where(totals > 0, totals, 1.0)
    variances = (shares + ROUND / anchors.shape[1]) / (1 + ROUND)
    if task.prior is not None:
        variances = task.prior.with_public(variances)
    variances *= anchors.shape[1]
    update, rows = replace(task.update, local_epochs=1), np.maximum(task.cohort.lengths, 1)
    steps = np.ceil(rows / (task.update.batch_size or rows))
    hold = 1 + (steps * task.update.step_size * PROXIMAL / rows)[:, None] / variances[task.best]
    start = current = task.start
    # Made once: each epoch continues the shuffling.
    generators = list(task.generators())
    one = replace(task, update=update, generators=lambda: generators)
    for _ in range(task.update.local_epochs):
        anchor, moved = flatten(start), flatten(tuned(one, current))
        current = unflatten(anchor + (moved - anchor) / hold, start)
    return current
