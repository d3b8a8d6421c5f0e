"""A client's own model, made at its node from the hypothesis that fits it best; it never leaves.

Either the hypothesis is trained further on the client's rows (fine-tuning), or the result is mixed with it in the
shares that suit rows it was not trained on (model interpolation: Mansour, Mohri, Ro and Suresh, 2020; of
parameters, as in Deng, Kamani and Mahdavi, 2020). Nothing is released, so neither costs any privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner
from umbel.privacy.gate.policy import Personal
from umbel.protocol.arrays import Arrays, all_finite

SHARES = np.linspace(0, 1, 11)
"""Of what a client trained, in what may become its model."""

Generators = Callable[[], Sequence[np.random.Generator]]
"""Returns the generator of each client, from its beginning."""


def personal(
    how: Personal,
    learner: Learner,
    hypotheses: Arrays,
    chosen: NDArray[np.int64],
    cohort: Cohort,
    update: LocalUpdate,
    generators: Generators,
) -> Arrays:
    r"""Return each client's own model, of a model without local parameters.

    Parameters
    ----------
    how : Personal
    learner : Learner
    hypotheses : dict of ndarray, each (k, \*shape)
    chosen : ndarray of int, shape (clients,)
        The hypothesis that fits each client best.
    cohort : Cohort
    update : LocalUpdate
    generators : callable

    Returns
    -------
    dict of ndarray, each (clients, \*shape)
        The hypothesis itself where training did not end in finite numbers.
    """
    start = {name: value[chosen] for name, value in hypotheses.items()}
    if how is Personal.NO:
        return start
    tuned = _tuned(learner, start, cohort, update, generators)
    if how is Personal.FINE_TUNE:
        return tuned
    return _mixed(start, tuned, best_shares(learner, hypotheses, chosen, cohort, update, generators))


def best_shares(
    learner: Learner,
    hypotheses: Arrays,
    chosen: NDArray[np.int64],
    cohort: Cohort,
    update: LocalUpdate,
    generators: Generators,
) -> NDArray[np.float64]:
    """Return for each client the share, of `SHARES`, with the lowest loss on every fifth of its rows.

    What it mixes was trained on the others. It is 0, the hypothesis alone, for a client of a single row.
    """
    seen, held_out = cohort.split()
    start = {name: value[chosen] for name, value in hypotheses.items()}
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
