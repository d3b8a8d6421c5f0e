"""Clients' own predictors: each has a few networks with weights, a factor and an offset on the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner, best_hypothesis
from umbel.models.losses import Score
from umbel.models.prior import Prior
from umbel.protocol.arrays import Arrays

WEIGHTS, FACTOR, OFFSET = "own:weights", "own:factor", "own:offset"
"""Names of arrays in a client's file; no parameter's name has a colon."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Predictors:
    r"""Each client's predictor: ``factor * mixture + offset``.

    The mixture is `mixed` of the outputs of m networks. For a loss of classes, factor and offset apply to the logits.
    A method by import path may return another kind of predictor, which derives from this one.

    Attributes
    ----------
    parameters : dict of ndarray, each (clients, m, \*shape)
        Shared parameters. If all clients have the same networks, a view (``np.broadcast_to``).
    weights : ndarray, shape (clients, m)
    factor, offset : ndarray, shape (clients, outputs)
        For each number along the last axis of an output.
    """

    parameters: Arrays
    weights: Floats
    factor: Floats
    offset: Floats

    def __len__(self) -> int:
        return len(self.weights)

    @classmethod
    def plain(cls, parameters: Arrays, outputs: int, weights: Floats | None = None) -> Self:
        r"""Return predictors without factor and offset, from networks (clients, m, \*shape)."""
        clients, m = next(iter(parameters.values())).shape[:2]
        shape = clients, outputs
        return cls(
            parameters, np.ones((clients, m)) / m if weights is None else weights, np.ones(shape), np.zeros(shape)
        )

    @classmethod
    def weighted(cls, clients: int, hypotheses: Arrays, outputs: int, shares: Floats) -> Self:
        r"""Return the hypotheses (k, \*shape) weighted by shares (k,), for clients without labelled rows."""
        return cls.plain(same_for(clients, hypotheses), outputs, np.tile(shares, (clients, 1)))

    @classmethod
    def joined(cls, parts: Sequence[Predictors]) -> Predictors:
        """Join the predictors of several cohorts, with as many networks each, to those of one."""
        if len(parts) == 1:
            return parts[0]
        names = parts[0].parameters
        return cls(
            {name: np.concatenate([own.parameters[name] for own in parts]) for name in names},
            np.concatenate([own.weights for own in parts]),
            np.concatenate([own.factor for own in parts]),
            np.concatenate([own.offset for own in parts]),
        )

    @classmethod
    def chosen(cls, made: Sequence[Predictors], which: NDArray[np.int64]) -> Self:
        """Return, for each client, one of its predictors.

        If one has fewer networks, the rest get weight 0.
        """
        m = max(own.weights.shape[1] for own in made)

        def filled(value: NDArray[Any]) -> NDArray[Any]:
            # The first network fills up: its outputs are finite if the predictor's are.
            return np.concatenate([value, np.repeat(value[:, :1], m - value.shape[1], axis=1)], axis=1)

        def taken(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
            result = values[0].copy()
            for i, value in enumerate(values):
                result[which == i] = value[which == i]
            return result

        return cls(
            {name: taken([filled(own.parameters[name]) for own in made]) for name in made[0].parameters},
            taken([np.pad(own.weights, ((0, 0), (0, m - own.weights.shape[1]))) for own in made]),
            taken([own.factor for own in made]),
            taken([own.offset for own in made]),
        )

    def arrays(self, client: int) -> Arrays:
        r"""Return a client's predictor as named arrays, for a file.

        A single network becomes its parameters, (\*shape) each. Otherwise parameters are (m, \*shape), beside `WEIGHTS`
        (m,), `FACTOR` and `OFFSET` (outputs,).
        """
        used = self.weights[client] > 0
        networks = {name: value[client][used] for name, value in self.parameters.items()}
        weights, factor, offset = self.weights[client][used], self.factor[client], self.offset[client]
        if len(weights) == 1 and weights[0] == 1 and (factor == 1).all() and (offset == 0).all():
            return {name: value[0] for name, value in networks.items()}
        return networks | {WEIGHTS: weights, FACTOR: factor, OFFSET: offset}

    @classmethod
    def read(cls, arrays: Arrays, outputs: int = 1) -> Self:
        """Return the predictor of one client from `arrays`; `outputs` is for a single network."""
        networks = {name: value[None] for name, value in arrays.items() if name not in (WEIGHTS, FACTOR, OFFSET)}
        if WEIGHTS not in arrays:
            return cls.plain({name: value[None] for name, value in networks.items()}, outputs)
        return cls(networks, arrays[WEIGHTS][None], arrays[FACTOR][None], arrays[OFFSET][None])

    def part(self, clients: slice | NDArray[np.int64]) -> Predictors:
        """Return the predictors of some clients."""
        parameters = {name: value[clients] for name, value in self.parameters.items()}
        return Predictors(parameters, self.weights[clients], self.factor[clients], self.offset[clients])

    def outputs(self, learner: Learner, cohort: Cohort) -> Tensor:
        """Return each client's predictions for its rows, (rows, \\*output shape)."""
        return self.exact_outputs(learner, cohort).float()

    def exact_outputs(self, learner: Learner, cohort: Cohort) -> Tensor:
        """Return what `outputs` rounds to float32."""
        owner = torch.from_numpy(np.repeat(np.arange(len(self)), cohort.lengths)).to(learner.device)
        found = learner.outputs(self.parameters, cohort).double()
        result = mixed(learner.model.loss, found, torch.from_numpy(self.weights).to(learner.device)[owner].T)
        factor, offset = (
            torch.from_numpy(one).to(learner.device)[owner].reshape(len(owner), *[1] * (result.ndim - 2), one.shape[1])
            for one in (self.factor, self.offset)
        )
        return factor * result + offset

    def score(self, learner: Learner, cohort: Cohort) -> tuple[Floats, Floats]:
        """Return each client's loss and metric (clients,) as reported; NaN for a client without rows."""
        outputs = self.outputs(learner, cohort)[None]

        def of(score: Score) -> Floats:
            mean = torch.from_numpy(means(row_scores(score, outputs, cohort)[0], cohort.lengths))
            return np.asarray(score.report(mean).numpy(), np.float64)

        return of(learner.model.loss), of(learner.model.metric)


def hypothesis_outputs(learner: Learner, hypotheses: Arrays, cohort: Cohort) -> Tensor:
    r"""Return the outputs of k hypotheses (k, \*shape) for each row, (k, rows, \*output shape)."""
    return learner.outputs(same_for(len(cohort), hypotheses), cohort)


def same_for(clients: int, hypotheses: Arrays) -> Arrays:
    r"""Return k hypotheses as each client's networks (clients, k, \*shape), a view."""
    return {name: np.broadcast_to(value, (clients, *value.shape)) for name, value in hypotheses.items()}


def mixed(loss: Score, outputs: Tensor, weights: Tensor) -> Tensor:
    r"""Mix m outputs (m, rows, \*output shape) by weights (m, rows).

    Classifiers are mixed as probabilities and returned as their logarithms; everything else is a weighted sum.
    """
    if len(outputs) == 1 and bool((weights == 1).all()):
        return outputs[0]
    weights = weights.reshape(*weights.shape, *[1] * (outputs.ndim - 2))
    if loss.name == "cross-entropy":
        return torch.logsumexp(weights.log() + functional.log_softmax(outputs, -1), 0)
    if loss.name == "log":
        return torch.logsumexp(weights.log() + functional.logsigmoid(outputs), 0) - torch.logsumexp(
            weights.log() + functional.logsigmoid(-outputs), 0
        )
    return (weights * outputs).sum(0)


def row_scores(score: Score, outputs: Tensor, cohort: Cohort) -> Floats:
    r"""Return a score's value (m, rows) of outputs (m, rows, \*output shape)."""
    targets = cohort.targets.expand(len(outputs), *cohort.targets.shape)
    return np.asarray(score.of_rows(outputs, targets, 2).double().cpu().numpy(), np.float64)


def sums(values: Floats, lengths: NDArray[np.int64]) -> Floats:
    r"""Return the sum (\*leading, clients) of numbers (\*leading, rows) over each client's rows."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    flat = values.reshape(math.prod(values.shape[:-1]), len(owner))
    found: Floats = np.stack([np.bincount(owner, one, len(lengths)) for one in flat], dtype=np.float64)
    return found.reshape(*values.shape[:-1], len(lengths))


def means(values: Floats, lengths: NDArray[np.int64]) -> Floats:
    """Return the mean, like `sums`; NaN for a client without rows."""
    with np.errstate(invalid="ignore"):
        found: Floats = sums(values, lengths) / lengths
    return found


Generators = Callable[[], Sequence[np.random.Generator]]
"""Returns the generator of each client, from its beginning."""


@dataclass(frozen=True)
class Task:
    r"""Hypotheses (k, \*shape) that the clients of a cohort personalise, by a `umbel.client.personal.method`.

    Each client's predictor is made only from the hypotheses and the client's rows. A client without rows gets the first
    hypothesis unchanged, or all of them with equal weights. Models with local parameters already are each client's own,
    and do not belong here.

    Attributes
    ----------
    update : LocalUpdate
        Settings for clients' further training, if a method trains.
    generators : callable
        Returns the generators that shuffle each client's rows.
    prior : Prior, optional
        The differences of clients around each hypothesis, from the server.
    """

    learner: Learner
    hypotheses: Arrays
    cohort: Cohort
    update: LocalUpdate
    generators: Generators
    prior: Prior | None = None

    @cached_property
    def outputs(self) -> Tensor:
        r"""The output of each hypothesis for each row, (k, rows, \*output shape)."""
        return hypothesis_outputs(self.learner, self.hypotheses, self.cohort)

    @cached_property
    def losses(self) -> Floats:
        """The loss of each hypothesis on each row, (k, rows)."""
        return row_scores(self.learner.model.loss, self.outputs, self.cohort)

    @cached_property
    def best(self) -> NDArray[np.int64]:
        """The hypothesis (clients,) that fits each client's rows best; the first for a client without rows."""
        return best_hypothesis(means(self.losses, self.cohort.lengths))

    @property
    def start(self) -> Arrays:
        r"""The best hypothesis of each client, (clients, \*shape)."""
        return {name: value[self.best] for name, value in self.hypotheses.items()}

    @property
    def best_outputs(self) -> Tensor:
        r"""The outputs of each client's best hypothesis for its rows, (rows, \*output shape)."""
        owner = np.repeat(self.best, self.cohort.lengths)
        return self.outputs[owner, np.arange(len(owner))]

    def networks(self, parameters: Arrays) -> Predictors:
        r"""Return one network for each client (clients, \*shape) as the clients' predictors."""
        return Predictors.plain({name: value[:, None] for name, value in parameters.items()}, self.outputs.shape[-1])
