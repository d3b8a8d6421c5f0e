"""Ordinary Flower apps behind umbel's Mods, or `umbel.Gate`, on nodes in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from tests.helpers.messages import arrived, bare
from umbel.mods.gate import Gate
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.totals import Totals
from umbel.protocol.release import Release
from umbel.simulation.grid import InProcessGrid

Change = Callable[[NDArray[Any]], Any]
"""What a client makes of each array."""


def arrays(values: Mapping[str, Any]) -> ArrayRecord:
    """Return named arrays as a record, with their own types."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})


def answered(msg: Message, change: Change, **metrics: float) -> Message:
    """Return what an ordinary train function does: changed arrays, and metrics."""
    changed = {name: change(array.numpy()) for name, array in msg.content.array_records["arrays"].items()}
    return Message(RecordDict({"arrays": arrays(changed), "metrics": MetricRecord(dict(metrics))}), reply_to=msg)


class Node:
    """One node of an app whose train function is `train`; a site with its own data and ledger where it has a folder.

    `entries` are of the node's configuration; `asked` counts the calls of the app's functions.
    """

    def __init__(
        self,
        gate: Gate,
        train: Callable[[Message], Message],
        folder: Path | None = None,
        evaluate: Callable[[Message], Message] | None = None,
        **entries: Any,
    ) -> None:
        self.asked = 0
        app = ClientApp(mods=[gate])

        def counted(function: Callable[[Message], Message]) -> Callable[[Message, Context], Message]:
            def call(msg: Message, context: Context) -> Message:
                self.asked += 1
                return function(msg)

            return call

        app.train()(counted(train))
        app.train("steal")(counted(train))
        app.evaluate()(counted(evaluate or train))
        app.query()(counted(train))
        node_config: dict[str, Any] = {"partition-id": 3, "num-partitions": 4}
        if folder is not None:
            self.path = folder / "ledger.jsonl"
            Journal.create(self.path)
            node_config |= {"data-path": str(folder / "rows.csv"), "ledger-path": str(self.path)}
        node_config |= {key.replace("_", "-"): value for key, value in entries.items()}
        self.grid = InProcessGrid(app, {"lr": 0.1}, node_configs=[node_config])
        [self.id] = self.grid.get_node_ids()

    def send(self, content: RecordDict, message_type: str = "train") -> Message:
        """Return the reply to a message, after a round trip through bytes."""
        (reply,) = self.grid.send_and_receive([Message(content, self.id, message_type)])
        return arrived(reply)

    @property
    def account(self) -> Mapping[Release, int]:
        """What the node's client has paid for: at a site number 0, in simulation its partition's."""
        own = "data-path" in self.grid.contexts[self.id].node_config
        ledger = Journal(self.path) if own else Totals(self.grid.contexts[self.id].state)
        return ledger.account(0 if own else 3)

    @property
    def paid(self) -> int:
        """How often it was charged."""
        return sum(self.account.values())


def asks(values: Mapping[str, Any], round: Any = 1, k: Any = None) -> RecordDict:
    """Return the content of a message as stock strategies send it, and with `k` how many models are stacked in it."""
    config: dict[str, Any] = {"server-round": round, "lr": 0.1} | ({} if k is None else {"k": k})
    return RecordDict({"arrays": arrays(values), "config": ConfigRecord(config)})


def left(reply: Message) -> dict[str, NDArray[Any]]:
    """Return the arrays of a reply that has nothing but them and the weight, and check that nothing hides there."""
    assert set(reply.content) == {"arrays", "metrics"}
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 1}
    return {name: array.numpy() for name, array in bare(reply.content.array_records["arrays"]).items()}
