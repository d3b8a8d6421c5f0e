"""Ordinary Flower apps behind umbel's Mods, on a node in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from tests.helpers.flower_apps import arrays
from tests.helpers.flower_apps import left as numbers
from tests.helpers.messages import arrived, wire
from umbel.protocol.flower import identify
from umbel.simulation.grid import InProcessGrid

__all__ = ["answer", "arrays", "asks", "message", "moved", "node", "numbers", "wire"]

Handler = Callable[[Message, Context], Any]


def asks(values: Mapping[str, Any], k: Any = None, round: int = 1) -> RecordDict:
    """Return what a strategy sends: arrays, and with `k` how many models are stacked in them."""
    config: dict[str, Any] = {"server-round": round, "lr": 0.1} | ({} if k is None else {"k": k})
    return RecordDict({"arrays": arrays(values), "config": ConfigRecord(config)})


def moved(by: float) -> Handler:
    """Return a train function that adds a number to each parameter."""

    def train(msg: Message, context: Context) -> Message:
        record = arrays(
            {name: np.asarray(one.numpy() + by) for name, one in msg.content.array_records["arrays"].items()}
        )
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 61})}), reply_to=msg)

    return train


def node(mods: Sequence[Mod], train: Handler | None = None, **config: Any) -> InProcessGrid:
    """Return a grid of one node, whose app answers every type of message by `train`, by default unchanged."""
    app = ClientApp(mods=[*mods])
    for kind in (app.train(), app.train("again"), app.evaluate(), app.query()):
        kind(train or moved(0.0))
    return InProcessGrid(app, config.pop("run_config", {}), node_configs=[{"partition-id": 3} | config])


def message(content: RecordDict) -> Message:
    """Return a message to train, as a Mod gets it."""
    identify(1)
    return Message(content, 100, "train")


def answer(grid: InProcessGrid, content: RecordDict, kind: str = "train") -> Message:
    """Return a node's reply to a message, as it arrives at the server."""
    (reply,) = grid.send_and_receive([Message(content, next(iter(grid.get_node_ids())), kind)])
    return arrived(reply)
