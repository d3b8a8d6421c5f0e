"""Federated personalization: a model of which one part stays on the node.

The item vectors of a factor model travel; a client's user vector, its local model, never does
(PAC identifiability in federated personalization, Protocols 1 and 3). A node keeps the local
models of its clients in its own state from one round to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from client.cohort import Cohort, LocalUpdate, minibatches, shuffle
from models.base import Model, Score
from models.factors import SLOPES
from privacy import randomness
from privacy.laplace import NoiseSource
from protocol.arrays import Arrays
from protocol.records import from_array_record, to_array_record

_RECORD = "umbel.local"
_ITEMS = "items"

# How a newcomer fits its local model to the items: plain descent, and a little decay, without
# which the local model of a client whose items can be told apart would have no end to go to.
_NEWCOMER_STEPS = 200
_DECAY = 1e-3
_HELD_OUT = 5

Matrix = NDArray[np.float32]


class LocalModels:
    """The local models of a node's clients, which survive rounds and never leave the node.

    Parameters
    ----------
    state : RecordDict
        The node's ``context.state``.
    size : int
        k, the length of a local model.
    seed : int or None
        Of the first draw, from N(0, I/k); None takes the operating system's entropy.
    """

    def __init__(self, state: RecordDict, size: int, seed: int | None) -> None:
        self._state, self._size, self._seed = state, size, seed
        record = state.array_records.get(_RECORD)
        kept = from_array_record(record) if record else {}
        self._clients: NDArray[np.int64] = kept.get("clients", np.zeros(0, np.int64))
        self._models: Matrix = kept.get("models", np.zeros((0, size), np.float32))

    def read(self, clients: Sequence[int]) -> Matrix:
        """Return the local models (clients, k) of clients counted over the federation."""
        generators = randomness.streams(self._seed, "local", 0, clients)
        where = {client: row for row, client in enumerate(self._clients.tolist())}
        models = np.empty((len(clients), self._size), np.float32)
        for i, client in enumerate(clients):
            known = where.get(client)
            fresh = known is None
            models[i] = (
                generators[i].standard_normal(self._size) / np.sqrt(self._size) if fresh else self._models[known]
            )
        return models

    def write(self, clients: Sequence[int], models: Matrix) -> None:
        """Keep the local models of clients."""
        others = ~np.isin(self._clients, clients)
        self._clients = np.concatenate([self._clients[others], np.asarray(clients, np.int64)])
        self._models = np.concatenate([self._models[others], models])
        self._state[_RECORD] = to_array_record({"clients": self._clients, "models": self._models})


def train(
    model: Model,
    items: Matrix,
    users: Matrix,
    cohort: Cohort,
    update: LocalUpdate,
    generators: Sequence[np.random.Generator],
    balanced: bool = False,
) -> tuple[Matrix, Matrix]:
    """Run CLIENTUPDATE of Protocol 1 or 3 for each client, all clients together.

    A step takes a minibatch, moves its items by ``-alpha s_i u`` and the local model by ``-alpha``
    times the mean of ``s_i v_i``, both from where they were, with ``s_i = l'(y_i u . v_i) y_i``
    (Eqs. 1 and 2). An item occurs once at most among a client's rows.

    Parameters
    ----------
    model : Model
        A factor model.
    items : ndarray, shape (I, k)
        The item vectors that the server sent.
    users : ndarray, shape (clients, k)
        The clients' local models.
    cohort : Cohort
        Features are items' numbers, targets labels of -1 and 1.
    update : LocalUpdate
    generators : sequence of Generator, one a client
    balanced : bool
        Fill every minibatch with as many liked items as others. The rest of a client's rows
        waits for another pass.

    Returns
    -------
    items : ndarray, shape (clients, I, k)
    users : ndarray, shape (clients, k)
    """
    slope, step = SLOPES[model.loss.name], np.float32(update.step_size)
    numbers, labels = _items_and_labels(cohort)
    lengths, order = _balanced(labels, cohort.lengths, update, generators) if balanced else (
        cohort.lengths,
        shuffle(cohort.lengths, update, generators),
    )  # fmt: skip
    if balanced and update.batch_size:
        update = LocalUpdate(
            update.local_epochs, update.step_size, max(2, update.batch_size // 2 * 2), update.local_steps
        )
    # One item more than there are, where padding goes.
    moved = np.empty((len(users), len(items) + 1, items.shape[1]), np.float32)
    moved[:, :-1], moved[:, -1] = items, 0
    before, users = users, users.copy()
    who = np.arange(len(users))[:, None]
    for rows, share, _ in minibatches(lengths, update, order):
        real = share > 0
        taken = np.where(real, numbers[rows], len(items))
        vectors, y = moved[who, taken], labels[rows]
        slopes = np.where(real, slope(y * np.einsum("mbk,mk->mb", vectors, users)) * y, 0).astype(np.float32)
        moved[who, taken] = vectors - step * slopes[..., None] * users[:, None]
        users -= step * np.einsum("mb,mbk->mk", slopes * share, vectors)
    trained = moved[:, :-1]
    # Training that blew up counts as no update (`privacy.gate`): the local model outlives it.
    blown_up = ~(np.isfinite(trained).all(axis=(1, 2)) & np.isfinite(users).all(axis=1))
    users[blown_up] = before[blown_up]
    return trained, users


def noisy_messages(
    trained: Matrix, items: Matrix, sigma: float, sources: Iterable[NoiseSource], everywhere: bool
) -> Matrix:
    """Add Gaussian noise to the items that changed, or to all of them (Eq. 3).

    Which items changed shows in the first case whatever the noise: those are the items that a
    client has labelled.

    Parameters
    ----------
    trained : ndarray, shape (clients, I, k)
    items : ndarray, shape (I, k)
        As the server sent them.
    sigma : float
        Standard deviation of each component.
    sources : iterable of NoiseSource, one a client
    everywhere : bool
        Whether items that did not change get noise as well.
    """
    noisy = trained.copy()
    for own, source in zip(noisy, sources, strict=True):
        changed = np.full(len(items), True) if everywhere else (own != items).any(axis=1)
        own[changed] += sigma * source.standard_normal(int(changed.sum()) * items.shape[1]).reshape(-1, items.shape[1])
    return noisy


def score_newcomers(model: Model, items: Matrix, cohort: Cohort) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return loss and metric of each client that has no local model yet.

    It fits one to the items as they are, on all its rows but every fifth, and is scored on those.

    Returns
    -------
    losses, metrics : ndarray, shape (clients,)
    """
    numbers, labels = _items_and_labels(cohort)
    slope = SLOPES[model.loss.name]
    longest = int(cohort.lengths.max())
    position = np.arange(longest)[None, :]
    real = position < cohort.lengths[:, None]
    rows = cohort.starts[:, None] + np.where(real, position, 0)
    held_out = real & (position % _HELD_OUT == _HELD_OUT - 1)
    # A client of few rows is scored on its last.
    held_out |= ~held_out.any(axis=1, keepdims=True) & (position == cohort.lengths[:, None] - 1)
    fit = real & ~held_out
    vectors, y = items[numbers[rows]].astype(np.float64), labels[rows]
    count = np.maximum(fit.sum(axis=1), 1)[:, None]
    size = np.square(vectors).sum(axis=2)
    step = 1 / (np.where(fit, size, 0).sum(axis=1, keepdims=True) / count / 4 + _DECAY)
    users = np.zeros((len(cohort), items.shape[1]))
    for _ in range(_NEWCOMER_STEPS):
        slopes = np.where(fit, slope(y * np.einsum("mbk,mk->mb", vectors, users)) * y, 0)
        users -= step * (np.einsum("mb,mbk->mk", slopes, vectors) / count + _DECAY * users)
    outputs = np.einsum("mbk,mk->mb", vectors, users)
    return _mean_score(model.loss, outputs, y, held_out), _mean_score(model.metric, outputs, y, held_out)


def only(hypotheses: Arrays) -> Matrix:
    """Return the item vectors (I, k) of the one hypothesis that a factor model comes as."""
    items: Matrix = hypotheses[_ITEMS][0]
    return items


def as_arrays(items: Matrix) -> Arrays:
    """Return item vectors (m, I, k) under their name in the model."""
    return {_ITEMS: items}


def _items_and_labels(cohort: Cohort) -> tuple[NDArray[np.int64], Matrix]:
    return cohort.features[:, 0].long().cpu().numpy(), cohort.targets.float().cpu().numpy()


def _balanced(
    labels: Matrix, lengths: NDArray[np.int64], update: LocalUpdate, generators: Sequence[np.random.Generator]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many rows of each client take part in a pass, and their order (passes, rows).

    Liked and other items take turns, as many of the one as of the other.
    """
    starts = np.cumsum(lengths) - lengths
    orders: list[NDArray[np.int64]] = []
    for c in range(len(lengths)):
        own = np.arange(starts[c], starts[c] + lengths[c])
        liked, others = own[labels[own] > 0], own[labels[own] < 0]
        pairs, generator = min(len(liked), len(others)), generators[c]
        passes = [
            np.stack([generator.permutation(liked)[:pairs], generator.permutation(others)[:pairs]], axis=1).ravel()
            for _ in range(update.passes)
        ]
        orders.append(np.array(passes, np.int64).reshape(update.passes, 2 * pairs))
    return np.array([order.shape[1] for order in orders]), np.concatenate(orders, axis=1)


def _mean_score(
    score: Score, outputs: NDArray[np.float64], labels: Matrix, rows: NDArray[np.bool_]
) -> NDArray[np.float64]:
    values = score.per_sample(torch.from_numpy(outputs)[..., None], torch.from_numpy(labels)).numpy()
    means: NDArray[np.float64] = np.where(rows, values, 0).sum(axis=1) / rows.sum(axis=1)
    return score.report(torch.from_numpy(means)).numpy()
