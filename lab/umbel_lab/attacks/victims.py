"""Asking clients of the real app, behind their own gate."""

from __future__ import annotations

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from umbel.privacy.channels.client import released_in
from umbel.privacy.channels.site import sums_in
from umbel.protocol.arrays import Arrays
from umbel.protocol.errors import FleetError
from umbel.simulation.grid import InProcessGrid


def answer(grid: InProcessGrid, content: RecordDict) -> RecordDict:
    """Return the reply of a grid's only node to a round's message; raise `FleetError` if its gate refuses."""
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([grid.create_message(content, "train", node, "1")])
    if reply.has_error():
        raise FleetError("the gate refused; its reason is in the log above", code="nodes.refused")
    return reply.content


def what_left(content: RecordDict, asked: int, by_site: bool = False) -> tuple[Arrays, NDArray[np.float64]]:
    r"""Return the arrays in a reply about so many clients, each (m, \*shape), and no counts.

    If a site releases, these are its sums, each (k, \*shape), and counts (k,). Raises `FleetError` unless all clients
    released something.
    """
    counts = np.empty(0)
    if by_site:
        arrays, counts, released = sums_in(content, asked)
    else:
        arrays, released, _ = released_in(content, asked)
    if not released.all():
        raise FleetError("some clients are over budget: an environment variable sets a limit", code="nodes.budget")
    return arrays, counts
