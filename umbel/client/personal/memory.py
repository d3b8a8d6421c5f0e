"""Clients' rows in memory: a prediction is a mean of the targets of the nearest rows.

Distances are Euclidean, between representations: the inputs of the model's last layer. If that layer computes several
outputs of a row apart, such as those of the next tokens, each has its own representation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.client.cohort import Cohort
from umbel.client.learner import Learner
from umbel.models.fit import look
from umbel.models.losses import Loss
from umbel.models.model import Model
from umbel.privacy.gate.undisclosed import check_time
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import ModelError

NEIGHBOURS = 10
"""Nearest rows that a prediction reads; all, if there are fewer."""
KEYS, VALUES, SHARE = "own:keys", "own:values", "own:share"
"""Names of arrays in a client's file; no parameter's name has a colon."""

Rows = Tensor | NDArray[Any]

_AT_ONCE = 1 << 22  # distances computed together


@dataclass(frozen=True)
class Memory:
    """The memory of each client.

    Attributes
    ----------
    keys : ndarray of float32, shape (keys, d)
        Representations, those of a client together.
    values : ndarray, shape (keys, numbers)
        Their targets: numbers as they are stored, classes as one-hot vectors.
    lengths : ndarray of int, shape (clients,)
        Number of keys of each client.
    shares : ndarray, shape (clients,)
        Share of the memory in a client's predictions, from 0 to below 1.
    """

    keys: NDArray[np.float32]
    values: NDArray[np.float64]
    lengths: NDArray[np.int64]
    shares: NDArray[np.float64]

    def part(self, clients: slice | NDArray[np.int64]) -> Memory:
        """Return the memories of some clients."""
        ends, some = self.lengths.cumsum(), np.arange(len(self.lengths))[clients]
        keys = np.concatenate([np.arange(0), *(np.arange(ends[c] - self.lengths[c], ends[c]) for c in some)])
        return Memory(self.keys[keys], self.values[keys], self.lengths[clients], self.shares[clients])

    def arrays(self, client: int) -> Arrays:
        """Return a client's memory as named arrays, for a file; none if it has no share in predictions."""
        one = self.part(slice(client, client + 1))
        return {KEYS: one.keys, VALUES: one.values, SHARE: one.shares} if one.shares[0] > 0 else {}

    @classmethod
    def read(cls, arrays: Arrays) -> Self | None:
        """Return the memory of one client from `arrays`, if there is one."""
        if SHARE not in arrays:
            return None
        return cls(arrays[KEYS], arrays[VALUES], np.array([len(arrays[KEYS])]), arrays[SHARE])

    def told(self, learner: Learner, networks: Arrays, cohort: Cohort, outputs: Tensor) -> Tensor:
        r"""Return the memories' predictions for the clients' rows, in the shape of the networks' outputs.

        Predictions of a client whose memory has no share are 0.

        Parameters
        ----------
        networks : dict of ndarray, each (clients, \*shape)
        outputs : Tensor, shape (rows, \*output shape)
        """
        clients = np.flatnonzero((self.shares > 0) & (cohort.lengths > 0))
        found = torch.zeros(outputs.shape, dtype=torch.float64, device=outputs.device)
        for c in clients:
            one, rows = slice(c, c + 1), slice(cohort.starts[c], cohort.starts[c] + cohort.lengths[c])
            own = {name: value[one] for name, value in networks.items()}
            queries = by_key(representations(learner, own, cohort.part(one)), outputs[rows])
            found[rows] = self.part(one).nearest(queries).reshape(outputs[rows].shape)
        return as_outputs(learner.model.loss, found)

    def nearest(self, queries: Tensor, without: int = 0) -> Tensor:
        """Return the mean values (queries, numbers) of the `NEIGHBOURS` keys of a single client nearest to each query.

        A key at distance d has the weight ``exp(-d)``. Among keys at the same distance, the earlier counts as nearer.

        Parameters
        ----------
        queries : Tensor, shape (queries, d)
        without : int
            If it is above 0, the queries are the keys. Each reads no key of the row it belongs to, of so many keys.
        """
        keys, values = (torch.from_numpy(one).to(queries.device) for one in (self.keys, self.values))
        parts, size = [], max(1, _AT_ONCE // max(len(keys), NEIGHBOURS * values.shape[1]))
        for begin in range(0, len(queries), size):
            check_time()
            some = queries[begin : begin + size]
            # Not by a product of matrices, whose rounding depends on the other queries.
            far = torch.cdist(some, keys, compute_mode="donot_use_mm_for_euclid_dist").double()
            if without:
                row = torch.arange(len(keys), device=far.device) // without
                far[row[begin : begin + size, None] == row] = torch.inf
            far, which = far.sort(dim=1, stable=True)
            # Relative to the nearest, so that far keys have weights above 0 too.
            weights = torch.softmax(-far[:, :NEIGHBOURS], 1)
            parts.append((weights[..., None] * values[which[:, :NEIGHBOURS]]).sum(1))
        return torch.cat(parts)


def check_memory(model: Model, features: Rows, targets: Rows) -> None:
    """Raise `ModelError` if the nearest rows cannot predict for such rows, of which only shapes and types are read."""
    shape, of_a_row = tuple(features.shape[1:]), tuple(targets.shape[1:])
    seen, classes = look(model, shape), "int" in str(targets.dtype)
    outputs = seen.outputs
    one_hot = (outputs[-1],) if classes and outputs[-1] > 1 and len(of_a_row) < len(outputs) else ()
    if math.prod(of_a_row + one_hot) != math.prod(outputs):
        raise _unfit(model, f"has outputs of shape {outputs}, which are no mean of targets of shape {of_a_row}")
    with torch.no_grad():
        found = model.representations({}, torch.zeros(2, *shape, dtype=torch.int64 if seen.tokens else torch.float32))
    if len(found) != 2 or found.ndim < 2:
        raise _unfit(model, f"gives its last layer two rows as {tuple(found.shape)}, not one along the first axis")


def _unfit(model: Model, why: str) -> ModelError:
    text = f"model {model.name!r} {why}; choose another method than knn-per"
    return ModelError(text, code="model.no-neighbours")


def representations(learner: Learner, networks: Arrays, cohort: Cohort) -> Tensor:
    r"""Return the representation of each row by its client's network, each (clients, \*shape)."""
    found = [
        learner.representations(
            {name: value[c] for name, value in networks.items()}, cohort.part(slice(c, c + 1)).features
        )
        for c in np.flatnonzero(cohort.lengths)
    ]
    return torch.cat(found)


def by_key(representation: Tensor, outputs: Tensor) -> Tensor:
    r"""Return representations (keys, d) from those of rows; outputs (rows, \*output shape) say how many a row has."""
    apart = representation.shape[:-1] == outputs.shape[:-1]
    return representation.float().flatten(0, -2) if apart else representation.float().flatten(1)


def as_outputs(loss: Loss, means: Tensor) -> Tensor:
    r"""Return mean values (rows, \*output shape) as outputs: logarithms of shares of classes, log-odds of labels."""
    if loss.name == "cross-entropy":
        return means.log()
    if loss.name == "log":
        return (1 + means).clamp(min=0).log() - (1 - means).clamp(min=0).log()
    return means
