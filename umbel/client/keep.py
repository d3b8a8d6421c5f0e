"""A client's own model when a run is over: made of the hypothesis that fits its data best, and kept at home."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from umbel.client.cohort import Cohort, LocalUpdate
from umbel.client.learner import best_hypothesis
from umbel.client.local import LocalParameters
from umbel.client.node import Node
from umbel.client.personal import personal
from umbel.privacy.gate.randomness import streams
from umbel.protocol.arrays import Arrays
from umbel.protocol.home import write_atomically


def keep(node: Node, hypotheses: Arrays, kept: LocalParameters, folder: Path) -> None:
    r"""Write ``client-N.safetensors`` for each client of the node to the folder that its site names.

    N is the client's number in the data, and each file replaces that of the run before. It holds the
    shared parameters, and the client's own local ones if it has trained any. Of a model that has no local
    parameters, the shared ones are made the client's own first, if the site says so (`umbel.client.personal`).

    Parameters
    ----------
    node : Node
    hypotheses : dict of ndarray, each (k, \*shape)
    kept : LocalParameters
    folder : Path
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    clients = sorted({*node.training, *node.validation})
    trained = kept.known(clients) if node.model.local_shapes else clients
    new = sorted({*clients} - {*trained})
    if trained:
        local = kept.read(trained)
        cohort = Cohort.gather(node.dataset, trained, node.learner.device)
        best = node.learner.choose(hypotheses, cohort, local)
        own = _of_each(hypotheses, best) if local else _personal(node, hypotheses, best, cohort, trained)
        _write(folder, trained, own | local)
    if new:
        cohort = Cohort.gather(node.dataset, new, node.learner.device)
        losses, _ = node.learner.score_newcomers(hypotheses, cohort, kept.fresh(new), node.run.step_size)
        _write(folder, new, _of_each(hypotheses, best_hypothesis(losses)))


def _personal(
    node: Node, hypotheses: Arrays, best: NDArray[np.int64], cohort: Cohort, clients: Sequence[int]
) -> Arrays:
    policy, run = node.site.policy, node.run
    update = LocalUpdate(
        policy.personalise_epochs,
        run.step_size,
        run.batch_size,
        max_examples=policy.max_examples,
        descent=node.descent,
    )
    # Round 0: rounds of training count from 1.
    draws = partial(streams, node.seed, "shuffle", 0, clients)
    return personal(policy.personalise, node.learner, hypotheses, best, cohort, update, draws)


def _of_each(hypotheses: Arrays, best: NDArray[np.int64]) -> Arrays:
    return {name: value[best] for name, value in hypotheses.items()}


def _write(folder: Path, clients: Sequence[int], models: Arrays) -> None:
    for i, client in enumerate(clients):
        own = {name: np.ascontiguousarray(value[i]) for name, value in models.items()}
        write_atomically(folder / f"client-{client}.safetensors", safetensors.numpy.save(own), private=True)
