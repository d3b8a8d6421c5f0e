"""Nodes of an in-process grid, asked one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict

from umbel.client.app import app
from umbel.data import Manifest, offsets_of, write_dataset
from umbel.privacy.site.journal import Journal
from umbel.simulation.grid import InProcessGrid


def ask(grid: InProcessGrid, content: RecordDict, kind: str = "train", node: int = 0) -> Message:
    """Return the reply of a grid's node to a message."""
    ids = list(grid.get_node_ids())
    (reply,) = grid.send_and_receive([Message(content, ids[node], kind, group_id="1")])
    return reply


def serving(folder: Path, run: dict[str, Any], about: Manifest, *rows: Any, **policy: Any) -> InProcessGrid:
    """Return the grid of a site with data and a ledger in a folder, in a run that names no data or model of its own.

    `rows` are features, targets and each client's number of rows.
    """
    features, targets, lengths = rows
    write_dataset(folder / "own", about, features, targets, offsets_of(lengths))
    ledger = Journal.create(folder / "ledger.jsonl").path
    config = {"data-path": str(folder / "own"), "ledger-path": str(ledger)}
    config |= {key.replace("_", "-"): value for key, value in policy.items()}
    return InProcessGrid(app, run | {"dataset": "", "model": "", "loss": "", "local": ""}, node_configs=[config])
