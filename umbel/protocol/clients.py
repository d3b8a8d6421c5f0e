"""The three numbers of a client: in the run, on its node, and in the dataset.

The server samples clients by their number in the run. A message numbers the clients of its node, so that it says
nothing of other nodes. Data, ledger and random streams use the number in the dataset.

The server turns the first into the second (`umbel.nodes.roster.Roster.place`). The node turns the second into
the third: `umbel.privacy.site.config.Site.client_ids` for the ledger, `umbel.client.node.Node.training_clients` for the
data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

ClientInRun = NewType("ClientInRun", int)
"""Over all nodes of a run, from 0, in the order of the nodes."""
ClientOnNode = NewType("ClientOnNode", int)
"""Within a node, from 0: training clients first, then validation clients."""
ClientInDataset = NewType("ClientInDataset", int)
"""Over the whole dataset, from 0; a node hosts the clients of its partition."""


def counted(clients: Sequence[int], first: int, step: int) -> list[int]:
    """Return ``first + step * client`` of each client."""
    return list(clients) if (first, step) == (0, 1) else [first + step * client for client in clients]
