"""Losses, which clients minimise, and metrics, which they report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import vmap

from umbel.protocol.errors import ModelError
from umbel.protocol.plugins import import_by_name

# RMSE has no gradient at residual zero; this gives it one, far below any real mean square.
TINY = 1e-12

Array = NDArray[np.floating]
S = TypeVar("S", bound="Score")


@dataclass(frozen=True)
class Score:
    """A value for each sample, and the way to report its mean over a client's samples.

    Attributes
    ----------
    name : str
    per_sample : callable
        ``(outputs (*batch, o), targets (*batch,) or (*batch, o)) -> (*batch,)``; for outputs of more axes see
        `of_rows`.
    report : callable
        Maps the mean over samples to the reported value, elementwise.
    higher_is_better : bool
    share : bool
        Whether it lies between 0 and 1.
    by_row : bool
        Whether `per_sample` takes a batch in the shapes of ``torch.nn.functional``, and is called with one row at a
        time.
    """

    name: str
    per_sample: Callable[[Tensor, Tensor], Tensor]
    report: Callable[[Tensor], Tensor]
    higher_is_better: bool = field(default=False, kw_only=True)
    share: bool = field(default=False, kw_only=True)
    by_row: bool = field(default=False, kw_only=True)

    def of_rows(self, outputs: Tensor, targets: Tensor, axes: int = 1) -> Tensor:
        r"""Return the value of each row, (\*batch,).

        Numbers with several axes, such as images, are compared as one vector. Where a row has several classes, such as
        the next tokens of a sequence, its value is their mean.

        Parameters
        ----------
        outputs : Tensor, shape (\*batch, \*output shape)
            The last axis is that of classes.
        targets : Tensor, shape (\*batch, \*target shape)
        axes : int
            Number of batch axes.
        """
        if self.by_row:
            return self._row_by_row(outputs, targets, axes)
        if outputs.ndim == axes + 1:
            return self.per_sample(outputs, targets)
        if targets.is_floating_point():
            return self.per_sample(outputs.flatten(axes), targets.flatten(axes))
        values = self.per_sample(outputs, targets)
        return values.flatten(axes).mean(-1) if values.ndim > axes else values

    def _row_by_row(self, outputs: Tensor, targets: Tensor, axes: int) -> Tensor:
        if targets.is_floating_point() and targets.numel() == outputs.numel():
            targets = targets.reshape(outputs.shape)  # one number a row is one output
        flat = outputs.flatten(0, axes - 1), targets.flatten(0, axes - 1)
        values = vmap(lambda one, target: self.per_sample(one[None], target[None]).mean())(*flat)
        return torch.reshape(values, outputs.shape[:axes])


@dataclass(frozen=True)
class Loss(Score):
    """A score that a local step can minimise.

    Attributes
    ----------
    objective : callable
        Maps the mean over a minibatch to the objective of a step, elementwise.
    """

    objective: Callable[[Tensor], Tensor]


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return ``|output - target|**2`` for each sample; classes count as one-hot vectors.

    Integers are classes if there are several outputs and one target for each sample.
    """
    if not targets.is_floating_point() and outputs.shape[-1] > 1 and targets.ndim < outputs.ndim:
        targets = nn.functional.one_hot(targets.long(), outputs.shape[-1])
    squares = (outputs - targets.reshape(outputs.shape)).square()
    return squares.squeeze(-1) if squares.shape[-1] == 1 else squares.sum(-1)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return ``-log softmax(output)[target]`` for each sample."""
    return torch.logsumexp(outputs, -1) - outputs.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 where the prediction is right, 0 elsewhere.

    The largest of several outputs is right if it is that of the target class, and a single score if it has the sign of
    the label, -1 or 1.
    """
    right = margin(outputs, targets) > 0 if outputs.shape[-1] == 1 else outputs.argmax(-1) == targets
    return right.to(outputs.dtype)


def _same(mean: Tensor) -> Tensor:
    return mean


LOSSES = {
    "mse": Loss("mse", squared_error, torch.sqrt, _same),
    "rmse": Loss("rmse", squared_error, torch.sqrt, lambda mean: (mean + TINY).sqrt()),
    "cross-entropy": Loss("cross-entropy", cross_entropy, _same, _same),
    "log": Loss("log", lambda outputs, targets: nn.functional.softplus(-margin(outputs, targets)), _same, _same),
    "hinge": Loss("hinge", lambda outputs, targets: (1 - margin(outputs, targets)).relu(), _same, _same),
    "margin": Loss("margin", lambda outputs, targets: -margin(outputs, targets), _same, _same),
}
"""Losses by name. ``mse`` minimises the mean square and reports its root, ``rmse`` minimises the root itself (group
privacy paper, Eq. 10); both report RMSE. ``log``, ``hinge`` and ``margin`` take one score and a label of -1 or 1 (PAC
paper, Sec. 3)."""

PROBABLE = frozenset({"cross-entropy", "log"})
"""Losses whose outputs are logarithms of probabilities, up to a number for each row, or their difference."""


def of_classes(outputs: Tensor) -> Tensor:
    """Return a number for each class (rows, classes), of which the largest is predicted.

    A single score (rows, 1) is that of the second class, whose label is 1; the first has 0.
    """
    return outputs if outputs.shape[1] > 1 else torch.cat([torch.zeros_like(outputs), outputs], 1)


METRICS = {
    "rmse": Score("rmse", squared_error, torch.sqrt),
    "accuracy": Score("accuracy", correct, _same, higher_is_better=True, share=True),
}
METRICS["right-sign"] = METRICS["accuracy"]  # that of a single score


def load_loss(name: str) -> Loss:
    """Return a loss by name, or by import path: a function ``(outputs, targets)`` that PyTorch can differentiate.

    It may return the mean over the rows in a batch, or a value for each row, as the functions of
    ``torch.nn.functional`` do. It gets one row at a time, as a batch of one.

    Raises
    ------
    ModelError, ConfigError
        If there is no such loss; the text lists the choices.
    """
    return Loss(name, _function(name), _same, _same, by_row=True) if ":" in name else _named(LOSSES, name, "loss")


def load_metric(name: str) -> Score:
    """Return a metric like `load_loss`; a function says by ``higher_is_better = True`` that more is better."""
    if ":" not in name:
        return _named(METRICS, name, "metric")
    own = _function(name)
    return Score(name, own, _same, higher_is_better=bool(getattr(own, "higher_is_better", False)), by_row=True)


def _named(known: dict[str, S], name: str, what: str) -> S:
    if name not in known:
        fix = f"choose from {', '.join(known)} or give package.module:function"
        raise ModelError(
            f"unknown loss or metric {name!r}; {fix}",
            code="model.unknown-loss" if what == "loss" else "model.unknown-metric",
        )
    return known[name]


def _function(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    found: Callable[[Tensor, Tensor], Tensor] = import_by_name(name)
    if not callable(found) or isinstance(found, type):
        raise ModelError(f"{name!r} is not a function of outputs and targets", code="model.not-a-function")
    return found


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return ``y z``, the margin of scores (batch, 1) for labels -1 and 1."""
    return outputs.squeeze(-1) * targets


SLOPES: dict[str, Callable[[Array], Array]] = {
    "log": lambda margins: -0.5 * (1 - np.tanh(margins / 2)),
    "hinge": lambda margins: -(margins < 1).astype(margins.dtype),
    "margin": lambda margins: -np.ones_like(margins),
}
"""Derivative of each margin loss (Assumption 2); at 0 it is not 0."""
