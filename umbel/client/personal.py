"""A client's own model when a run is over, made of the hypothesis that fits it best; it never leaves the node.

Either the hypothesis is trained further on the client's rows (fine-tuning), or the result is mixed with it in the
shares that suit rows it was not trained on (model interpolation: Mansour, Mohri, Ro and Suresh, 2020; of
parameters, as in Deng, Kamani and Mahdavi, 2020). Nothing is released, so neither costs any privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner, best_hypothesis
from umbel.client.local import LocalParameters
from umbel.client.node import Node
from umbel.privacy.gate.policy import Personal
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import Arrays, all_finite
from umbel.protocol.home import write_atomically

SHARES = np.linspace(0, 1, 11)
"""Of what a client trained, in what may become its model."""

Generators = Callable[[], Sequence[np.random.Generator]]
"""Returns the generator of each client, from its beginning."""


def keep(node: Node, hypotheses: Arrays, kept: LocalParameters, folder: Path) -> None:
    r"""Write ``client-N.safetensors`` for each client of the node to the folder that its site names.

    N is the client's number in the data, and each file replaces that of the run before. It holds the
    shared parameters, and the client's own local ones if it has trained any. Of a model that has no local
    parameters, the shared ones are made the client's own first, if the site says so (`personal`).

    Parameters
    ----------
    hypotheses : dict of ndarray, each (k, \*shape)
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    clients = sorted({*node.training, *node.validation})
    trained = kept.known(clients) if node.model.local_shapes else clients
    new = sorted({*clients} - {*trained})
    if trained:
        local = kept.read(trained)
        cohort = Cohort.gather(node.dataset, trained, node.learner.device)
        best = of_each(hypotheses, node.learner.choose(hypotheses, cohort, local))
        _write(folder, trained, (best if local else _personal(node, best, cohort, trained)) | local)
    if new:
        cohort = Cohort.gather(node.dataset, new, node.learner.device)
        losses, _ = node.learner.score_newcomers(hypotheses, cohort, kept.fresh(new), node.run.step_size)
        _write(folder, new, of_each(hypotheses, best_hypothesis(losses)))


def _personal(node: Node, start: Arrays, cohort: Cohort, clients: Sequence[int]) -> Arrays:
    policy, run = node.site.policy, node.run
    update = LocalUpdate(
        policy.personalise_epochs, run.step_size, run.batch_size, max_examples=policy.max_examples, descent=node.descent
    )
    # Round 0: rounds of training count from 1.
    draws = partial(streams, node.seed, "shuffle", 0, clients)
    return personal(policy.personalise, node.learner, start, cohort, update, draws)


def of_each(hypotheses: Arrays, best: NDArray[np.int64]) -> Arrays:
    """Return the hypothesis of each client, each (clients, \\*shape)."""
    return {name: value[best] for name, value in hypotheses.items()}


def _write(folder: Path, clients: Sequence[int], models: Arrays) -> None:
    for i, client in enumerate(clients):
        own = {name: np.ascontiguousarray(value[i]) for name, value in models.items()}
        write_atomically(folder / f"client-{client}.safetensors", safetensors.numpy.save(own), private=True)


def personal(
    how: Personal, learner: Learner, start: Arrays, cohort: Cohort, update: LocalUpdate, generators: Generators
) -> Arrays:
    r"""Return each client's own model, of a model without local parameters.

    It is the one that the client starts from (clients, \*shape) where training did not end in finite numbers.
    """
    if how is Personal.NO:
        return start
    tuned = _tuned(learner, start, cohort, update, generators)
    if how is Personal.FINE_TUNE:
        return tuned
    return _mixed(start, tuned, best_shares(learner, start, cohort, update, generators))


def best_shares(
    learner: Learner, start: Arrays, cohort: Cohort, update: LocalUpdate, generators: Generators
) -> NDArray[np.float64]:
    """Return for each client the share, of `SHARES`, with the lowest loss on every fifth of its rows.

    What it mixes was trained on the others. It is 0, the hypothesis alone, for a client of a single row.
    """
    seen, held_out = cohort.split()
    tuned = _tuned(learner, start, seen, update, generators)
    best = np.zeros(len(cohort))
    for c in range(len(cohort)):
        one, own = ({name: value[[c] * len(SHARES)] for name, value in arrays.items()} for arrays in (start, tuned))
        losses, _ = learner.score(_mixed(one, own, SHARES), held_out.part(slice(c, c + 1)))
        best[c] = SHARES[np.argmin(np.where(np.isfinite(losses[:, 0]), losses[:, 0], np.inf))]
    return best


def _tuned(learner: Learner, start: Arrays, cohort: Cohort, update: LocalUpdate, generators: Generators) -> Arrays:
    """Return what each client trains from its start (clients, \\*shape)."""
    trained, _ = learner.train(start, np.arange(len(cohort)), cohort, update, generators())
    sound = np.all([all_finite(value.reshape(len(cohort), -1), axis=1) for value in trained.values()], axis=0)
    return {name: np.where(_wide(sound, value), value, start[name]) for name, value in trained.items()}


def _mixed(start: Arrays, tuned: Arrays, shares: NDArray[np.float64]) -> Arrays:
    return {
        name: (value + _wide(shares, value) * (tuned[name] - value)).astype(value.dtype)
        for name, value in start.items()
    }


def _wide(numbers: NDArray[np.generic], like: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return numbers (clients,) so that each goes with a client's array."""
    return numbers.reshape(-1, *[1] * (like.ndim - 1))
