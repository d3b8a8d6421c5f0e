"""Ordinary Flower apps behind umbel's Mods, on a node in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from numpy.typing import NDArray

from umbel.protocol.flower import identify
from umbel.simulation.grid import InProcessGrid

Handler = Callable[[Message, Context], Any]


def arrays(values: Mapping[str, Any]) -> ArrayRecord:
    """Return named arrays as a record, with their own types."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})


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
    return message_from_proto(ProtoMessage.FromString(wire(reply)))


def wire(message: Message) -> bytes:
    """Return a message as the bytes that travel."""
    data: bytes = message_to_proto(message).SerializeToString()
    return data


def numbers(reply: Message) -> dict[str, NDArray[Any]]:
    """Return the arrays of a reply that has nothing but them and the weight 1."""
    assert set(reply.content) == {"arrays", "metrics"}
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 1}
    return {name: array.numpy() for name, array in reply.content.array_records["arrays"].items()}
