"""A client's own model when a run is over: the hypothesis that fits its data best, kept at home."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from client.cohort import Cohort
from client.learner import best_hypothesis
from client.local import LocalParameters
from client.node import Node
from protocol.arrays import Arrays
from protocol.home import write_atomically


def keep(node: Node, hypotheses: Arrays, kept: LocalParameters, folder: Path) -> None:
    r"""Write ``client-N.safetensors`` for each client of the node to the folder that its site names.

    N is the client's number in the data, and each file replaces that of the run before. It holds the
    shared parameters, and the client's own local ones if it has trained any.

    Parameters
    ----------
    node : Node
    hypotheses : dict of ndarray, each (k, \*shape)
    kept : LocalParameters
    folder : Path
    """
    folder.mkdir(parents=True, exist_ok=True)
    clients = sorted({*node.training, *node.validation})
    trained = kept.known(clients) if node.model.local_shapes else clients
    new = sorted({*clients} - {*trained})
    if trained:
        local = kept.read(trained)
        cohort = Cohort.gather(node.federation, trained, node.learner.device)
        _write(folder, trained, node.learner.choose(hypotheses, cohort, local), hypotheses, local)
    if new:
        cohort = Cohort.gather(node.federation, new, node.learner.device)
        losses, _ = node.learner.score_newcomers(hypotheses, cohort, kept.fresh(new), node.run.step_size)
        _write(folder, new, best_hypothesis(losses), hypotheses, {})


def _write(folder: Path, clients: Sequence[int], best: NDArray[np.int64], hypotheses: Arrays, local: Arrays) -> None:
    for i, client in enumerate(clients):
        own = {name: np.ascontiguousarray(value[best[i]]) for name, value in hypotheses.items()}
        own |= {name: np.ascontiguousarray(value[i]) for name, value in local.items()}
        write_atomically(folder / f"client-{client}.safetensors", safetensors.numpy.save(own))
