"""kNN-Per: clients' rows in memory, so that a prediction is in part a mean of the targets of the nearest rows.

Distances are Euclidean, between representations: the inputs of the model's last layer, as one vector a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.client.cohort import Cohort
from umbel.client.learner import Learner
from umbel.client.personal.calibrate import numbers
from umbel.client.personal.predictors import FACTOR, OFFSET, WEIGHTS, Predictors, Task, mixed, row_scores, sums
from umbel.models.losses import Loss, Score
from umbel.models.model import Model
from umbel.privacy.site.time_limit import check_time
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ModelError

NEIGHBOURS = 10
"""Nearest rows that a prediction reads; all, if there are fewer."""
KEYS, VALUES, SHARE = "own:keys", "own:values", "own:share"
"""Names of arrays in a client's file; no parameter's name has a colon."""

SHARES = np.append(np.linspace(0, 0.9, 10), 0.99)
"""Shares lambda to choose from; at 1, classes that no neighbour has would be impossible."""

_AT_ONCE = 1 << 22  # distances computed together


@dataclass(frozen=True)
class Remembering(Predictors):
    """Predictors with a memory, which has a share in their predictions.

    Attributes
    ----------
    keys : ndarray of float32, shape (keys, d)
        Representations, those of a client together.
    values : ndarray, shape (keys, numbers)
        Their targets: numbers as they are stored, classes as one-hot vectors.
    counts : ndarray of int, shape (clients,)
        Number of keys of each client.
    shares : ndarray, shape (clients,)
        Share of the memory in a client's predictions, from 0 to below 1.
    """

    keys: NDArray[np.float32]
    values: NDArray[np.float64]
    counts: NDArray[np.int64]
    shares: NDArray[np.float64]

    def part(self, clients: slice | NDArray[np.int64]) -> Self:
        """Return the predictors of some clients."""
        counts = self.counts[clients]
        spans = zip(self.counts.cumsum()[clients], counts, strict=True)
        kept = np.concatenate([np.arange(0), *(np.arange(end - count, end) for end, count in spans)])
        memory = {"keys": self.keys[kept], "values": self.values[kept], "counts": counts}
        return type(self)(**vars(super().part(clients)), **memory, shares=self.shares[clients])

    def arrays(self, client: int) -> Arrays:
        """Return a client's predictor as named arrays, for a file; a memory without a share is left out."""
        arrays, own = super().arrays(client), self.part(slice(client, client + 1))
        if not own.shares[0]:
            return arrays
        if WEIGHTS not in arrays:
            arrays = {name: value[None] for name, value in arrays.items()}
            arrays |= {WEIGHTS: own.weights[0], FACTOR: own.factor[0], OFFSET: own.offset[0]}
        return arrays | {KEYS: own.keys, VALUES: own.values, SHARE: own.shares}

    @classmethod
    def read(cls, arrays: Arrays, outputs: int = 1) -> Predictors:  # type: ignore[override]
        """Return the predictor of one client from `arrays`, with a memory if it has one."""
        own = Predictors.read({name: arrays[name] for name in arrays if name not in (KEYS, VALUES, SHARE)}, outputs)
        if SHARE not in arrays:
            return own
        memory: dict[str, Any] = {"keys": arrays[KEYS], "values": arrays[VALUES], "shares": arrays[SHARE]}
        return cls(**vars(own), **memory, counts=np.array([len(arrays[KEYS])]))

    def exact_outputs(self, learner: Learner, cohort: Cohort) -> Tensor:
        """Return what `outputs` rounds to float32."""
        outputs, loss = super().exact_outputs(learner, cohort), learner.model.loss
        told = torch.zeros_like(outputs)
        for c in np.flatnonzero((self.shares > 0) & (cohort.lengths > 0)):
            one, rows = slice(c, c + 1), slice(cohort.starts[c], cohort.starts[c] + cohort.lengths[c])
            own = self.part(one)
            networks = {name: value[:, 0] for name, value in own.parameters.items()}
            queries = representations(learner, networks, cohort.part(one))
            told[rows] = nearest(own.keys, own.values, queries).reshape(outputs[rows].shape)
        shares = torch.from_numpy(np.repeat(self.shares, cohort.lengths)).to(learner.device)
        return with_share(loss, outputs, as_outputs(loss, told), shares)


def nearest(keys: NDArray[Any], values: NDArray[Any], queries: Tensor, leave_out: bool = False) -> Tensor:
    """Return the mean values (queries, numbers) of the `NEIGHBOURS` keys of a single client nearest to each query.

    A key at distance d has the weight ``exp(-d)``. Among keys at the same distance, the earlier counts as nearer. With
    `leave_out` the queries are the keys, and each leaves out itself.
    """
    there, targets = (torch.from_numpy(one).to(queries.device) for one in (keys, values))
    size = max(1, _AT_ONCE // max(len(keys), NEIGHBOURS * values.shape[1]))
    parts = []
    for begin in range(0, len(queries), size):
        check_time()
        some = queries[begin : begin + size]
        # Not by a product of matrices, whose rounding depends on the other queries.
        far = torch.cdist(some, there, compute_mode="donot_use_mm_for_euclid_dist").double()
        if leave_out:
            far[:, begin : begin + size].fill_diagonal_(torch.inf)
        far, which = far.sort(dim=1, stable=True)
        # Relative to the nearest, so that far keys have weights above 0 too.
        weights = torch.softmax(-far[:, :NEIGHBOURS], 1)
        parts.append((weights[..., None] * targets[which[:, :NEIGHBOURS]]).sum(1))
    return torch.cat(parts)


def knn_per(task: Task) -> Predictors:
    """Return ``lambda kNN(x) + (1 - lambda) w(x)``: the hypothesis w, and a mean of the targets of the nearest rows.

    Marfoq, Neglia, Kameni and Vidal, *Personalized federated learning through local memorization*, ICML 2022:
    `Remembering` keeps a client's rows as their representations under w. Classes are mixed as probabilities. Lambda is
    the best of `SHARES` if each row is left out of the memory once; the paper takes rows for validation. A client of a
    single row gets 0, the hypothesis alone.
    """
    model, cohort, outputs = task.learner.model, task.cohort, task.best_outputs.double()
    own = task.networks(task.start)
    if not len(outputs):
        return own
    try:
        values, pair = numbers(outputs, cohort), torch.cat([cohort.features[:1]] * 2).cpu()
        seen = last_input(model, lambda: model.apply({}, pair))
    except (RuntimeError, IndexError):  # targets have another shape than outputs, or the last layer is not called
        seen = outputs.new_zeros(0)
    if len(seen) != 2:
        text = f"model {model.name!r} has no input of its last layer, or no mean of targets, for each row"
        raise ModelError(f"{text}; choose another method than knn-per", code="model.no-neighbours")
    keys, counts = representations(task.learner, task.start, cohort), cohort.lengths
    memory: dict[str, Any] = {"keys": keys.cpu().numpy(), "values": values.reshape(len(keys), -1), "counts": counts}
    remembering = Remembering(**vars(own), **memory, shares=np.zeros(len(cohort)))
    ones = [remembering.part(slice(c, c + 1)) for c in np.flatnonzero(cohort.lengths)]
    means = [nearest(one.keys, one.values, torch.from_numpy(one.keys).to(keys.device), leave_out=True) for one in ones]
    told, losses = as_outputs(model.loss, torch.cat(means).reshape(outputs.shape)), []
    for share in SHARES:
        both = with_share(model.loss, outputs, told, outputs.new_full((len(outputs),), share))
        losses.append(sums(row_scores(model.loss, both.float()[None], cohort)[0], cohort.lengths))
    best = SHARES[np.where(np.isnan(losses), np.inf, losses).argmin(0)]
    return Remembering(**vars(own), **memory, shares=np.where(cohort.lengths > 1, best, 0.0))


def with_share(loss: Score, outputs: Tensor, others: Tensor, shares: Tensor) -> Tensor:
    r"""Mix other outputs into outputs, both (rows, \*output shape), in shares (rows,); unchanged if a share is 0."""
    both = mixed(loss, torch.stack([outputs, others]), torch.stack([1 - shares, shares]))
    return torch.where((shares > 0).reshape(-1, *[1] * (outputs.ndim - 1)), both, outputs)


def representations(learner: Learner, networks: Arrays, cohort: Cohort) -> Tensor:
    r"""Return the representation (rows, d) of each row by its client's network, each (clients, \*shape)."""

    def of(c: Any) -> Tensor:
        own, rows = {name: value[c][None, None] for name, value in networks.items()}, cohort.part(slice(c, c + 1))
        return last_input(learner.model, lambda: learner.outputs(own, rows))

    return torch.cat([of(c) for c in np.flatnonzero(cohort.lengths)]).float().flatten(1)


def last_input(model: Model, call: Callable[[], object]) -> Tensor:
    """Return the input ``(batch, ...)`` of the last layer with shared parameters when `call` applies a model.

    For a model of one layer it is the model's input.
    """
    layer = model.module.get_submodule(next(reversed(model.shapes)).rpartition(".")[0])
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _layer, given: seen.append(given[0]))
    try:
        call()
    finally:
        hook.remove()
    return seen[-1]


def as_outputs(loss: Loss, means: Tensor) -> Tensor:
    r"""Return mean values (rows, \*output shape) as outputs: logarithms of shares of classes, log-odds of labels."""
    if loss.name == "cross-entropy":
        return means.log()
    if loss.name == "log":
        return (1 + means).clamp(min=0).log() - (1 - means).clamp(min=0).log()
    return means
