"""A client's own model when a run is over: the hypothesis that fits its data best, kept at home."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy

from client.cohort import Cohort
from client.learner import best_hypothesis
from client.node import Node
from privacy.randomness import streams
from protocol.arrays import Arrays
from protocol.home import write_atomically


def keep(node: Node, hypotheses: Arrays, folder: Path) -> None:
    """Write ``client-N.safetensors`` for each client of the node to the folder that its site names.

    N is the client's number in the data, and each file replaces that of the run before. A model of
    which a part stays on the node comes as it was broadcast.

    Parameters
    ----------
    node : Node
    hypotheses : dict of ndarray, each (k, \\*shape)
    folder : Path
    """
    folder.mkdir(parents=True, exist_ok=True)
    clients, learner = sorted({*node.training, *node.validation}), node.learner
    cohort = Cohort.gather(node.federation, clients, learner.device)
    if node.model.local_shapes:
        fresh = node.model.initial_local(streams(node.seed, "keep", 0, clients))
        best = best_hypothesis(learner.score_newcomers(hypotheses, cohort, fresh, node.run.step_size)[0])
    else:
        best = learner.choose(hypotheses, cohort)
    for client, j in zip(clients, best.tolist(), strict=True):
        own = {name: np.ascontiguousarray(value[j]) for name, value in hypotheses.items()}
        write_atomically(folder / f"client-{client}.safetensors", safetensors.numpy.save(own))
