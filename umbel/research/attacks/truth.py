"""The truth that attacks are judged by: what clients of an in-process grid keep to themselves.

No server can read it. Here the nodes live in the attacker's own process, so that the audit looks into
their state; nothing travels, and the app has no message for it.
"""

from __future__ import annotations

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray

from umbel.client.local import LocalParameters
from umbel.client.node import Node
from umbel.privacy.gate.site import in_process
from umbel.protocol.arrays import Arrays
from umbel.server.nodes.roster import TRAIN, Roster
from umbel.simulation.grid import InProcessGrid


def local_parameters(grid: Grid, roster: Roster, clients: NDArray[np.int64], run: str = "") -> dict[int, Arrays]:
    r"""Return the local parameters that training clients have now.

    Parameters
    ----------
    grid : Grid
    roster : Roster
        Which node hosts whom.
    clients : ndarray of int
        Counted over the dataset.
    run : str
        Name of the run.

    Returns
    -------
    dict from int to dict of ndarray, each of its own \*shape
        By client; empty where the nodes are not in this process.
    """
    found: dict[int, Arrays] = {}
    if not isinstance(grid, InProcessGrid):
        return found
    for node_id, (positions, locals_) in roster.place(TRAIN, clients).items():
        context = grid.contexts[node_id]
        with in_process():
            node = Node.of(context.node_config, context.run_config)
        kept = LocalParameters(node.site, context.state, node.model, run, node.seed)
        values = kept.read(node.training_clients(tuple(locals_)))
        for row, position in enumerate(positions):
            found[int(clients[position])] = {name: value[row] for name, value in values.items()}
    return found
