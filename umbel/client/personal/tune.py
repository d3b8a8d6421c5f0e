"""The best hypothesis trained further on the client's rows, or mixed with the result.

Fine-tuning; and model interpolation (Mansour, Mohri, Ro and Suresh, 2020; of parameters, as in Deng, Kamani and
Mahdavi, 2020), with the share that suits rows outside the training.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from umbel.client.learner import arrays_of
from umbel.client.personal.predictors import Floats, Predictors, Task
from umbel.protocol.arrays import Arrays, all_finite

SHARES = np.linspace(0, 1, 11)
"""Shares of the trained model that a mixture may have."""


def as_it_is(task: Task) -> Predictors:
    """Return the hypotheses that fit best."""
    return task.networks(task.start)


def fine_tune(task: Task) -> Predictors:
    """Return the best hypotheses, trained further; unchanged if that did not end in finite numbers."""
    return task.networks(tuned(task, task.start))


def interpolate(task: Task) -> Predictors:
    """Return a mean of the best hypothesis and the tuned one, in the `best_shares`."""
    start = task.start
    return task.networks(between(start, tuned(task, start), best_shares(task)))


def best_shares(task: Task) -> Floats:
    """Return for each client the share, from `SHARES`, with the lowest loss on every fifth of its rows.

    The model to mix was trained on the other rows. A client with a single row gets 0, the hypothesis alone.
    """
    seen, held_out = task.cohort.split()
    start = task.start
    trained = tuned(replace(task, cohort=seen), start)
    losses = np.stack(
        [
            task.networks(between(start, trained, np.full(len(seen), share))).score(task.learner, held_out)[0]
            for share in SHARES
        ]
    )
    return np.asarray(SHARES[np.where(np.isfinite(losses), losses, np.inf).argmin(0)], np.float64)


def tuned(task: Task, start: Arrays, only: frozenset[str] | None = None) -> Arrays:
    r"""Train from each client's start, (clients, \*shape): all parameters, or `only` some; return the result."""
    learner, clients = task.learner, len(task.cohort)
    shared, each = learner.tensors(start), torch.arange(clients)
    after, _ = learner.train(shared, each, task.cohort, task.update, task.generators(), only=only)
    trained = arrays_of(after)
    sound = np.all([all_finite(value.reshape(clients, -1), axis=1) for value in trained.values()], axis=0)
    return {name: np.where(wide(sound, value), value, start[name]) for name, value in trained.items()}


def between(start: Arrays, end: Arrays, shares: Floats) -> Arrays:
    r"""Return the points at a share (clients,) of the way, each (clients, \*shape)."""
    return {
        name: (value + wide(shares, value) * (end[name] - value)).astype(value.dtype) for name, value in start.items()
    }


def wide(numbers: NDArray[np.generic], like: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return numbers (clients,) in a shape that broadcasts with a client's array."""
    return numbers.reshape(-1, *[1] * (like.ndim - 1))
