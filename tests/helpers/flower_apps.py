"""Ordinary Flower apps behind umbel's Mods, or `umbel.Gate`, on nodes in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from tests.helpers.hostile import npy
from tests.helpers.messages import arrived, bare
from umbel.mods.gate import Gate
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.totals import Totals
from umbel.protocol.release import Release
from umbel.simulation.grid import InProcessGrid

Change = Callable[[NDArray[Any]], Any]
"""What a client makes of each array."""
Train = Callable[[Message], Message]
SECRET = "diagnosis-of-patient-17"
"""What nobody may read in a reply."""


def arrays(values: Mapping[str, Any]) -> ArrayRecord:
    """Return named arrays as a record, with their own types."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})


def answered(msg: Message, change: Change, **metrics: float) -> Message:
    """Return what an ordinary train function does: changed arrays, and metrics."""
    changed = {name: change(array.numpy()) for name, array in msg.content.array_records["arrays"].items()}
    return Message(RecordDict({"arrays": arrays(changed), "metrics": MetricRecord(dict(metrics))}), reply_to=msg)


def replies(**records: Any) -> Train:
    """Return a function whose reply has these records."""
    return lambda msg: Message(RecordDict(records), reply_to=msg)


def fails(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises an error."""

    def fail(*_: Any) -> Any:
        raise error

    return fail


def returns(start: Mapping[str, Any], far: float, **changes: Any) -> Train:
    """Return a function that adds `far` to all numbers of `start`; some arrays are others, or None, which are missing.

    It does so wherever the server starts.
    """
    values = {name: value + value.dtype.type(far) for name, value in start.items()} | changes
    return replies(arrays=arrays({name: value for name, value in values.items() if value is not None}))


def tampers(msg: Message) -> Message:
    """Make the message say that the server had sent what the data say, and its metadata as well."""
    sent = msg.content.array_records["arrays"]
    secret = sent["w"].numpy() + np.float32(1e4)
    sent["w"].data = npy(secret)
    trained = ArrayRecord({**sent})
    msg.content["arrays"] = arrays({SECRET: secret})
    msg.content["config"] = ConfigRecord({SECRET: 1})
    msg.metadata.__dict__["_group_id"] = SECRET
    msg.metadata.message_type = "train.diagnosis_of_patient_17"
    return Message(RecordDict({"arrays": trained}), reply_to=msg)


def useless(start: dict[str, Any], far: float) -> dict[str, Train]:
    """Return functions that return no model, and `SECRET` wherever a server might read it."""
    w = start["w"] + start["w"].dtype.type(far)
    both, odd = arrays(start | {"w": w}), Array("float32", w.shape, "numpy.ndarray", SECRET.encode())
    return {
        "raises": fails(ValueError(SECRET)),
        "ends the process": fails(SystemExit(SECRET)),
        "runs out of memory": fails(MemoryError(SECRET)),
        "replies an error": lambda msg: Message(Error(17, SECRET), reply_to=msg),
        "replies nothing": lambda msg: None,  # type: ignore[dict-item,return-value]
        "returns no arrays": replies(metrics=MetricRecord({"loss": 17.0})),
        "returns two records": replies(arrays=both, **{SECRET: both}),
        "misses an array": returns(start, far, w=None),
        "has one too many": returns(start, far, **{SECRET: w}),
        "calls one otherwise": returns(start, far, w=None, **{SECRET: w}),
        "returns another shape": returns(start, far, w=w.reshape(1, -1)),
        "returns no axes": returns(start, far, w=w.ravel()[0]),
        "returns text": returns(start, far, w=np.full(w.shape, SECRET)),
        "returns what is no array": replies(arrays=ArrayRecord({**both, "w": odd})),
    }


class Node:
    """One node of an app whose train function is `train`; a site with its own data and ledger where it has a folder.

    `entries` are of the node's configuration; `asked` counts the calls of the app's functions.
    """

    def __init__(
        self,
        gate: Gate,
        train: Train,
        folder: Path | None = None,
        evaluate: Train | None = None,
        **entries: Any,
    ) -> None:
        self.asked = 0
        app = ClientApp(mods=[gate])

        def counted(function: Train) -> Callable[[Message, Context], Message]:
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
