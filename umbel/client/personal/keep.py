"""Files of a run's result that a site keeps for each of its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import Learner, best_hypothesis
from umbel.client.local import LocalParameters
from umbel.client.node import Node
from umbel.client.personal import Predictors, Task, method
from umbel.client.trial import try_out
from umbel.models.prior import Prior
from umbel.privacy.mechanisms.randomness import streams
from umbel.protocol.arrays import Arrays
from umbel.protocol.home import write_atomically


def models_to_keep(
    node: Node, hypotheses: Arrays, kept: LocalParameters, prior: Prior | None = None
) -> dict[int, Arrays]:
    r"""Return the arrays to keep for each client of the node, by its number in the data.

    For a model without local parameters they are the client's own predictor (`Predictors.arrays`), made by the site's
    ``personalise`` method. For a model with local parameters they are the best hypothesis, and the client's local
    parameters if it has trained any.

    Parameters
    ----------
    hypotheses : dict of ndarray, each (k, \*shape)
    prior : Prior, optional
        The differences of clients around each hypothesis, from the server.
    """
    clients, learner = sorted({*node.training, *node.validation}), node.learner
    if not node.site.simulated:  # these files are computed together, since they do not leave the node
        learner = try_out(node.model, node.dataset, node.run.device)
    if not node.model.local_shapes:
        own = _made(node, learner, hypotheses, clients, prior)
        return {client: own.arrays(i) for i, client in enumerate(clients)}
    found: dict[int, Arrays] = {}
    trained = kept.known(clients)
    new = sorted({*clients} - {*trained})
    if trained:
        local = kept.read(trained)
        cohort = Cohort.gather(node.dataset, trained, learner.device)
        best = of_each(hypotheses, learner.choose(learner.tensors(hypotheses), cohort, learner.tensors(local)).numpy())
        found |= _by_client(best | local, trained)
    if new:
        cohort = Cohort.gather(node.dataset, new, learner.device)
        losses, _ = learner.score_newcomers(
            learner.tensors(hypotheses), cohort, learner.tensors(kept.fresh(new)), node.run.step_size
        )
        found |= _by_client(of_each(hypotheses, best_hypothesis(losses)), new)
    return found


def write_models(folder: Path, models: Mapping[int, Arrays]) -> None:
    """Write ``client-N.safetensors`` for each client to the folder that its site names; the last run's are replaced."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for client, arrays in models.items():
        own = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
        write_atomically(folder / f"client-{client}.safetensors", safetensors.numpy.save(own), private=True)


def _made(node: Node, learner: Learner, hypotheses: Arrays, clients: Sequence[int], prior: Prior | None) -> Predictors:
    policy, run = node.site.policy, node.run
    epochs = policy.personalise.epochs
    update = LocalUpdate(
        epochs, run.step_size, run.batch_size, max_examples=policy.max_work.examples, descent=node.descent
    )
    cohort = Cohort.gather(node.dataset, clients, learner.device)
    # Round 0, since training rounds count from 1.
    draws = partial(streams, node.seed, "shuffle", 0, clients)
    return method(policy.personalise.method)(Task(learner, hypotheses, cohort, update, draws, prior))


def of_each(hypotheses: Arrays, best: NDArray[np.int64]) -> Arrays:
    """Return the hypothesis of each client, each (clients, \\*shape)."""
    return {name: value[best] for name, value in hypotheses.items()}


def _by_client(arrays: Arrays, clients: Sequence[int]) -> dict[int, Arrays]:
    return {client: {name: value[i] for name, value in arrays.items()} for i, client in enumerate(clients)}
