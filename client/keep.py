"""A client's own model when a run is over: the hypothesis that fits its data best, kept at home."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from client.cohort import Cohort, choose, choose_engine, pick_device
from client.node import Node
from protocol.arrays import Arrays
from protocol.home import write_atomically


def keep(node: Node, hypotheses: Arrays, run_config: Mapping[str, Any]) -> None:
    """Write ``client-N.safetensors`` for each client of the node to the folder that its site names.

    N is the client's number in the data, and each file replaces that of the run before. A model of
    which a part stays on the node comes as it was broadcast.

    Parameters
    ----------
    node : Node
    hypotheses : dict of ndarray, each (k, \\*shape)
    run_config : mapping
    """
    folder = node.site.keep_model
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    clients = sorted({*node.training, *node.validation})
    device = pick_device(str(run_config["device"]))
    engine = choose_engine(str(run_config["engine"]), node.model, device)
    best = choose(node.model, hypotheses, Cohort.gather(node.federation, clients, device), engine)
    for client, j in zip(clients, best.tolist(), strict=True):
        own = {name: np.ascontiguousarray(value[j]) for name, value in hypotheses.items()}
        write_atomically(folder / f"client-{client}.safetensors", safetensors.numpy.save(own))
