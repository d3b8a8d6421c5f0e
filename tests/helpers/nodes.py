"""Nodes of an in-process grid, asked one by one."""

from __future__ import annotations

from flwr.app import Message, RecordDict

from umbel.simulation.grid import InProcessGrid


def ask(grid: InProcessGrid, content: RecordDict, kind: str = "train", node: int = 0) -> Message:
    """Return the reply of a grid's node to a message."""
    ids = list(grid.get_node_ids())
    (reply,) = grid.send_and_receive([Message(content, ids[node], kind, group_id="1")])
    return reply
